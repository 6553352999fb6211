"""The grouped products of long steps on Hopper, whose operands TMA copies: rows of x are brought
into the order of the pairs before.
"""

from torch import Tensor

from dsv4.launch.kernel import Kernel, Shape, ceil_div
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.linear.prefill import (
    LARGE,
    LONG_TOKENS,
    MODE_DOWN,
    MODE_GATE_UP,
    NARROW,
    WIDE,
    Split,
    scale_arguments,
)
from dsv4.ops.linear.prefill_long import (
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


def is_long(order: Cut | Split, tokens: int) -> bool:
    """Whether a product of so many tokens is one of these, where operands allow it: as soon as it
    is, it is of more tokens, too. ``order``: of pairs, or of all tokens in their order.
    """
    if isinstance(order, Split):
        return tokens >= order.long_from
    return tokens >= LONG_TOKENS and not order.has_few(tokens)


def long_gate_up(
    recording: Recording,
    x_TE: Tensor,
    w1_w3: tuple[PackedWeight, PackedWeight],
    limit: float,
    hidden: Tensor,
    pairs: Sorted | Split,
    weights_TP: Tensor | None,
) -> None:
    """``dsv4.ops.moe.grouped.gate_up`` into ``hidden`` in steps that are long. ``pairs``: or, of
    all tokens in their order, what says which these are.
    """
    w1, w3 = w1_w3
    rows, columns = w1.shape[-2:]
    is_sorted = isinstance(pairs, Sorted)
    x_sorted = _gathered(recording, x_TE, pairs) if is_sorted else x_TE
    product = _product(recording, "long_gate_up", w1)
    recording.launch(
        by_tokens(_gate_up_shape, product, pairs.cut if is_sorted else pairs),
        x=token_boxes(x_sorted[:, None]),
        **matrix_boxes(w1, "w1", MODE_GATE_UP),
        **matrix_boxes(w3, "w3", MODE_GATE_UP),
        **scale_arguments(w1, "w1"),
        **scale_arguments(w3, "w3"),
        **(pairs.arguments if is_sorted else NO_PAIRS),
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


def _gate_up_shape(product: TiledProduct, order: Cut | Split, tokens: int) -> Shape | None:
    if not is_long(order, tokens):
        return None
    if isinstance(order, Cut):
        return product.shape(order.tiling(tokens), tokens=tokens)
    tile = LARGE if tokens > LARGE.tokens else NARROW
    return product.shape(Tiling(ceil_div(tokens, tile.tokens), tile), tokens=tokens)


def _down_shape(product: TiledProduct, cut: Cut, tokens: int) -> Shape | None:
    return product.shape(cut.tiling(tokens)) if is_long(cut, tokens) else None
