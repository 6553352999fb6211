"""The grouped products on Hopper, whose operands TMA copies: rows of x are brought into the order
of the pairs before.
"""

from torch import Tensor

from dsv4.integers import ceil_div
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.ops.linear.aligned import empty_rows
from dsv4.ops.linear.prefill import (
    FEW,
    LARGE,
    MODE_DOWN,
    MODE_GATE_UP,
    NARROW,
    SOME,
    WIDE,
    Split,
    scale_arguments,
)
from dsv4.ops.linear.prefill_long import LongForm, one_group
from dsv4.ops.moe.sorted_pairs import NO_PAIRS, Cut, Sorted, Tiling
from dsv4.ops.moe.tiled_product import TiledProduct
from dsv4.weights.packed import TILE_ROWS, PackedWeight, padded

# The mode of an entry of prefill_long_sm90.cu.
_MODES = {"long_gate_up": MODE_GATE_UP, "long_down": MODE_DOWN}
_SMALL_TILES = (FEW, SOME)
_TILES = (NARROW, WIDE, LARGE)
_GATHER_THREADS = 256


def long_gate_up(
    recording: Recording,
    x_TE: Tensor,
    w1_w3: tuple[PackedWeight, PackedWeight],
    limit: float,
    hidden: Tensor,
    pairs: Sorted | Split,
    weights_TP: Tensor | None,
) -> None:
    """``dsv4.ops.moe.grouped.gate_up`` into ``hidden``. ``pairs``: or, of all tokens in their
    order, what says which steps are long enough.
    """
    w1, w3 = w1_w3
    rows, columns = w1.shape[-2:]
    is_sorted = isinstance(pairs, Sorted)
    x_sorted = _gathered(recording, x_TE, pairs) if is_sorted else x_TE
    order = pairs.cut if is_sorted else pairs
    for form in _forms(recording, "long_gate_up", w1, order):
        product = _product(recording, "long_gate_up", form, rows)
        recording.launch(
            by_tokens(_gate_up_shape, product, order),
            x=form.token_boxes(one_group(x_sorted)),
            **form.matrix_boxes(w1, "w1"),
            **form.matrix_boxes(w3, "w3"),
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
    """``dsv4.ops.moe.grouped.down`` into ``products``."""
    rows, columns = w2.shape[-2:]
    for form in _forms(recording, "long_down", w2, pairs.cut):
        product = _product(recording, "long_down", form, rows)
        recording.launch(
            by_tokens(_down_shape, product, pairs.cut),
            h=form.token_boxes(one_group(hidden)),
            **form.matrix_boxes(w2, "w2"),
            **scale_arguments(w2, "w2"),
            **pairs.arguments,
            y=products,
            rows=rows,
            columns=columns,
            row_tiles=padded(rows) // TILE_ROWS,
        )


def _forms(
    recording: Recording, function: str, weight: PackedWeight, order: Cut | Split
) -> list[LongForm]:
    """One for steps whose tiles are small and one for the others, where there are such steps."""
    if isinstance(order, Split):
        found = [_TILES]
    else:
        of_ends = {order.tiling(tokens).tile for tokens in (1, recording.tokens)}
        found = [tiles for tiles in (_SMALL_TILES, _TILES) if of_ends.intersection(tiles)]
    rows = weight.shape[-2]
    return [LongForm.of(weight.format, _MODES[function], rows, tiles) for tiles in found]


def _product(recording: Recording, function: str, form: LongForm, rows: int) -> TiledProduct:
    return TiledProduct(function, form.builds, rows, recording.target.multiprocessors)


def _gathered(recording: Recording, x_TE: Tensor, pairs: Sorted) -> Tensor:
    tokens, width = x_TE.shape
    x_sorted = empty_rows(recording, (tokens * pairs.per_token, width), x_TE.dtype)
    recording.launch(
        by_tokens(_gather_shape, pairs.cut.per_token),
        x=x_TE,
        **pairs.arguments,
        sorted=x_sorted,
        width=x_sorted.stride(0),
        x_stride=x_TE.stride(0),
        per_token=pairs.per_token,
    )
    return x_sorted


def _gather_shape(per_token: int, tokens: int) -> Shape:
    kernel = Kernel("moe/gather_rows", "gather_rows")
    return Shape(kernel, tokens * per_token, _GATHER_THREADS)


def _gate_up_shape(product: TiledProduct, order: Cut | Split, tokens: int) -> Shape | None:
    if isinstance(order, Cut):
        return product.shape(order.tiling(tokens), tokens=tokens)
    if tokens < order.long_from:
        return None
    tile = LARGE if tokens > LARGE.tokens else NARROW
    return product.shape(Tiling(ceil_div(tokens, tile.tokens), tile), tokens=tokens)


def _down_shape(product: TiledProduct, cut: Cut, tokens: int) -> Shape | None:
    return product.shape(cut.tiling(tokens))
