"""Two products of a decode step that follow each other, as one launch."""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from dsv4.integers import round_up
from dsv4.launch.buffers import storage_key
from dsv4.launch.constants import FORMAT_CODE
from dsv4.launch.items import Item, Launch
from dsv4.launch.kernel import Defines, Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.ops.linear.decode_plan import LEAST_SHARED, SHARED_LIMIT, WARPS, slot_bytes
from dsv4.weights.packed import TILE_ROWS

# Three gained 0.3 % (docs/kernels/linear.md).
_MOST_TOKENS = 2
# Stages of a warp's ring, as many as there is room for. Fewer than in launches of their own were
# not tried.
_DEPTHS = (5, 4)
# A launch in front with more blocks than this share of the multiprocessors says nothing about which
# blocks start late.
_LATE_SHARE = 4
_FORMATS = {code: format for format, code in FORMAT_CODE.items()}


class _Product(NamedTuple):
    """A launch of ``decode_linear``: one matrix, or the groups of one, without a norm, of which
    every block has all of K.
    """

    arguments: Mapping[str, Any]
    defines: Mapping[str, int]
    blocks: int

    @property
    def rows(self) -> int:
        """Of all groups together."""
        return self.arguments["groups"] * self.arguments["rows"]


def join_products(recording: Recording) -> None:
    """Makes one launch of the last two items, where they are a product of one or two tokens and the
    product of all that it gives (o_a and o_b); else leaves them.

    The results are the same, bit for bit. All blocks of the launch have to be resident at once: on
    one device, such launches must not run at the same time on several streams.
    """
    if len(recording.items) < 2:
        return
    first, second = (_product(item) for item in recording.items[-2:])
    if first is None or second is None or not _follows(first, second):
        return
    rings = _rings(first, second)
    if rings is None:
        return
    recording.restore(recording.items[:-2])
    _record(recording, first, second, *rings)


def _product(item: Item) -> _Product | None:
    """The product of an item; None for any other item."""
    if not isinstance(item, Launch) or item.shape.kernel.function != "decode_linear":
        return None
    arguments = item.arguments
    defines = dict(item.shape.kernel.defines)
    alone = arguments["table"] is None and arguments["norm_weight"] is None
    if not alone or defines["CLUSTER"] > 1 or defines["TURNS"] > 1:
        return None
    return _Product(arguments, defines, _blocks(item))


def _follows(first: _Product, second: _Product) -> bool:
    """Whether the second one multiplies all that the first one gives, and the kernel can hand it
    over: whole tiles of a group, whole vectors of a row.
    """
    own = first.arguments
    following = second.arguments
    x = following["x"]
    y = own["y"]
    return (
        isinstance(y, Tensor)
        and storage_key(x) == storage_key(y)
        and x.storage_offset() == y.storage_offset()
        and following["groups"] == 1
        and own["tokens"] <= _MOST_TOKENS
        and own["float32_out"] == 0
        and own["rows"] % TILE_ROWS == 0
        and following["columns"] == following["row_stride"] == first.rows
        and first.defines["HOLDS_SLICE"] == 1
    )


def _rings(first: _Product, second: _Product) -> tuple[int, int] | None:
    """Stages of a warp's ring, and the shared memory of a block: behind the rings it has x and
    partial sums of one product at a time. None where there is no room.
    """
    formats = (_FORMATS[first.defines["FORMAT0"]], _FORMATS[second.defines["FORMAT0"]])
    behind = _larger(first, second, "x_bytes") + _larger(first, second, "partial_bytes")
    for depth in _DEPTHS:
        nbytes = WARPS * depth * slot_bytes(formats) + behind
        if nbytes <= SHARED_LIMIT:
            return depth, max(nbytes, LEAST_SHARED)
    return None


def _larger(first: _Product, second: _Product, name: str) -> int:
    return max(first.arguments[name], second.arguments[name])


def _record(
    recording: Recording, first: _Product, second: _Product, depth: int, shared_bytes: int
) -> None:
    own = first.arguments
    following = second.arguments
    half_bytes = round_up(2 * recording.tokens * first.rows, 16)
    name = f"decode_pair {first.rows}"
    kernel = Kernel("linear/decode_pair", "decode_pair", _defines(first, second, depth))
    blocks = max(first.blocks, second.blocks)
    recording.launch(
        Shape(kernel, blocks, 32 * WARPS, shared_bytes),
        **{name: own[name] for name in ("x", "row_stride", "group_stride", "tokens", "y")},
        **{name: own[name] for name in ("columns", "groups", "rows", "scale_shift")},
        **_matrix(own, 0),
        words=recording.zeroed(f"{name} words", 2 * half_bytes // 4),
        half_bytes=half_bytes,
        counter=recording.zeroed(name, 2),
        late_from=recording.target.multiprocessors - _blocks_in_front(recording),
        z=following["y"],
        z_rows=following["rows"],
        **_matrix(following, 1),
        float32_out=following["float32_out"],
        x_bytes=_larger(first, second, "x_bytes"),
        partial_bytes=_larger(first, second, "partial_bytes"),
        **{name: following[name] for name in ("peers", "slot", "exchange")},
    )


def _defines(first: _Product, second: _Product, depth: int) -> Defines:
    own = first.defines
    following = second.defines
    of_ranks = [name for name in ("RANKS", "STAMPS") if name in following]
    return (
        ("FORMAT0", own["FORMAT0"]),
        ("FORMAT1", following["FORMAT0"]),
        ("TOKENS", own["TOKENS"]),
        ("WARPS", own["WARPS"]),
        ("DEPTH", depth),
        ("ALIGNED_X", own["ALIGNED_X"]),
        ("RAGGED0", own["RAGGED_K"]),
        ("RAGGED1", following["RAGGED_K"]),
        ("PIECES0", own["PIECES"]),
        ("PIECES1", following["PIECES"]),
        ("HOLDS_SLICE1", following["HOLDS_SLICE"]),
        *((name, following[name]) for name in of_ranks),
    )


def _matrix(arguments: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What the kernel reads of the only matrix of a launch, by its names for that of ``index``."""
    names = {"data": "data0", "scale": "scale0", "tiles": "tiles0", "clusters": "clusters0"}
    found = {f"{name}{index}": arguments[of] for name, of in names.items()}
    return {**found, f"global_scale{index}": arguments["global_scale"]}


def _blocks_in_front(recording: Recording) -> int:
    """Multiprocessors that the launch in front has until it ends: attention's, of one token."""
    if not recording.items or not isinstance(recording.items[-1], Launch):
        return 0
    blocks = _blocks(recording.items[-1])
    return blocks if blocks * _LATE_SHARE <= recording.target.multiprocessors else 0


def _blocks(launch: Launch) -> int:
    return prod(launch.shape.grid)
