"""The grouped products of long steps on Hopper, whose operands TMA copies: rows of x are brought
into the order of the pairs before.
"""

from torch import Tensor

from dsv4.launch.kernel import Kernel, Shape, ceil_div
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.linear.prefill import (
    LARGE,
    MODE_DOWN,
    MODE_GATE_UP,
    NARROW,
    WIDE,
    scale_arguments,
)
from dsv4.ops.linear.prefill_long import (
    LONG_TOKENS,
    long_build,
    matrix_boxes,
    token_boxes,
)
from dsv4.ops.moe.sorted_pairs import NO_PAIRS, Cut, Sorted, Tiling
from dsv4.ops.moe.tiled_product import TiledProduct
from dsv4.weights.packed import TILE_ROWS, PackedWeight, padded

# The mode of an entry of prefill_long_sm90.cu.
_MODES = {"long_gate_up": MODE_GATE_UP, "long_down": MODE_DOWN}
_TILES = (NARROW, WIDE, LARGE)
_GATHER_THREADS = 256


def is_long(cut: Cut | None, tokens: int) -> bool:
    """Whether a product of so many tokens is one of these, where operands allow it: as soon as it
    is, it is of more tokens, too. ``cut`` None: of all tokens in their order.
    """
    return tokens >= LONG_TOKENS and (cut is None or not cut.has_few(tokens))


def long_gate_up(
    recording: Recording,
    x_TE: Tensor,
    w1_w3: tuple[PackedWeight, PackedWeight],
    limit: float,
    hidden: Tensor,
    pairs: Sorted | None,
    weights_TP: Tensor | None,
) -> None:
    """``dsv4.ops.moe.grouped.gate_up`` into ``hidden`` in steps that are long."""
    w1, w3 = w1_w3
    rows, columns = w1.shape[-2:]
    x_sorted = x_TE if pairs is None else _gathered(recording, x_TE, pairs)
    product = _product(recording, "long_gate_up", w1)
    recording.launch(
        by_tokens(_gate_up_shape, product, None if pairs is None else pairs.cut),
        x=token_boxes(x_sorted[:, None]),
        **matrix_boxes(w1, "w1", MODE_GATE_UP),
        **matrix_boxes(w3, "w3", MODE_GATE_UP),
        **scale_arguments(w1, "w1"),
        **scale_arguments(w3, "w3"),
        **(NO_PAIRS if pairs is None else pairs.arguments),
        routing=weights_TP,
        h=hidden,
        rows=rows,
        columns=columns,
        row_tiles=padded(rows) // TILE_ROWS,
        h_stride=hidden.stride(0),
        limit=limit,
    )


def long_down(
    recording: Recording, hidden: Tensor, w2: PackedWeight, products: Tensor, pairs: Sorted
) -> None:
    """``dsv4.ops.moe.grouped.down`` into ``products`` in steps that are long."""
    rows, columns = w2.shape[-2:]
    product = _product(recording, "long_down", w2)
    recording.launch(
        by_tokens(_down_shape, product, pairs.cut),
        h=token_boxes(hidden[:, None]),
        **matrix_boxes(w2, "w2", MODE_DOWN),
        **scale_arguments(w2, "w2"),
        **pairs.arguments,
        y=products,
        rows=rows,
        columns=columns,
        row_tiles=padded(rows) // TILE_ROWS,
    )


def _product(recording: Recording, function: str, weight: PackedWeight) -> TiledProduct:
    builds = tuple((tile, long_build(weight.format, _MODES[function], tile)) for tile in _TILES)
    return TiledProduct(function, builds, weight.shape[-2], recording.target.multiprocessors)


def _gathered(recording: Recording, x_TE: Tensor, pairs: Sorted) -> Tensor:
    tokens, width = x_TE.shape
    x_sorted = recording.empty((tokens * pairs.per_token, width), x_TE.dtype)
    recording.launch(
        by_tokens(_gather_shape, pairs.cut),
        x=x_TE,
        **pairs.arguments,
        sorted=x_sorted,
        width=width,
        x_stride=x_TE.stride(0),
        per_token=pairs.per_token,
    )
    return x_sorted


def _gather_shape(cut: Cut, tokens: int) -> Shape | None:
    if not is_long(cut, tokens):
        return None
    kernel = Kernel("moe/gather_rows", "gather_rows")
    return Shape(kernel, tokens * cut.per_token, _GATHER_THREADS)


def _gate_up_shape(product: TiledProduct, cut: Cut | None, tokens: int) -> Shape | None:
    """``cut`` None: of all tokens in their order."""
    if not is_long(cut, tokens):
        return None
    if cut is not None:
        return product.shape(cut.tiling(tokens), tokens=tokens)
    tile = LARGE if tokens > LARGE.tokens else NARROW
    return product.shape(Tiling(ceil_div(tokens, tile.tokens), tile), tokens=tokens)


def _down_shape(product: TiledProduct, cut: Cut, tokens: int) -> Shape | None:
    return product.shape(cut.tiling(tokens)) if is_long(cut, tokens) else None
