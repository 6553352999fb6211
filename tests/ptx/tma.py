"""cp.async.bulk: copies from global to shared memory that complete on an mbarrier."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.convergence import only
from tests.ptx.faults import BadDescriptor, Unsupported
from tests.ptx.operands import Layout
from tests.ptx.rows import LANES, Array, Mask, lanes
from tests.ptx.scalar import Build, Handler
from tests.ptx.syntax import Instruction, TensorAddress

if TYPE_CHECKING:
    from tests.ptx.cluster import Cluster
    from tests.ptx.tensor_map import TensorMap
    from tests.ptx.warp import Warp

OFFSET = 0xFFFFFF
"""The part of a shared address that is the same in all blocks of a cluster."""


def load(instruction: Instruction, layout: Layout) -> Handler:
    """cp.async.bulk.tensor to shared memory: a box, or four gathered rows."""
    if "im2col" in instruction.opcode or "mbarrier::complete_tx::bytes" not in instruction.opcode:
        raise Unsupported(instruction.text)
    target, source, barrier = instruction.operands[:3]
    assert isinstance(source, TensorAddress)
    pair = "cta_group::2" in instruction.opcode
    gather = "gather4" in instruction.opcode
    where = layout.address(target)
    map_address = layout.source(source.map, "u64")
    coordinates = [layout.source(item, "s32") for item in source.coordinates]
    signal = layout.address(barrier)
    blocks = None
    if "multicast" in instruction.opcode:
        blocks = layout.source(instruction.operands[3], "u16")

    def issue(warp: "Warp", mask: Mask) -> None:
        cluster = warp.block.cluster
        address = only(where(warp), mask)
        bar = only(signal(warp), mask)
        tensor_map = cluster.tensor_map(only(map_address(warp), mask))
        at = [only(read(warp), mask) for read in coordinates]
        ranks = None if blocks is None else cluster.ranks(only(blocks(warp), mask))
        fetch = _fetch(cluster, tensor_map, at, gather)
        _check(tensor_map, address, gather, str(warp))
        cluster.asynchronous.add(
            _arrival(cluster, fetch, tensor_map, (address, bar), (ranks, pair))
        )

    def run(warp: "Warp", mask: Mask) -> None:
        # Lanes may gather rows of their own; a box that several load is a missing election.
        for one in _each(mask) if gather else [mask]:
            issue(warp, one)

    return run


def _each(mask: Mask) -> Iterator[Mask]:
    """The active lanes one by one."""
    for lane in np.flatnonzero(lanes(mask)):
        yield np.arange(LANES) == lane


def _check(tensor_map: "TensorMap", address: int, gather: bool, who: str) -> None:
    if address % 128:
        raise BadDescriptor(
            f"TMA to shared address {address & OFFSET:#x}, not 128-byte aligned: {who}"
        )
    # Rows wider than the swizzle would overlap.
    width = tensor_map.row_bytes * tensor_map.element.spread
    if tensor_map.swizzle and width > 16 << tensor_map.swizzle:
        raise BadDescriptor(
            f"TMA box rows of {width} bytes with swizzle {tensor_map.swizzle}: {who}"
        )


def _fetch(
    cluster: "Cluster", tensor_map: "TensorMap", at: list[int], gather: bool
) -> Callable[[], Array]:
    if gather:
        return lambda: tensor_map.gather(at[0], at[1:], cluster.memory)
    return lambda: tensor_map.load(tuple(at), cluster.memory)


def _arrival(
    cluster: "Cluster",
    fetch: Callable[[], Array],
    tensor_map: "TensorMap",
    addresses: tuple[int, int],
    how: tuple[list[int] | None, bool],
) -> Callable[[], None]:
    address, bar = addresses
    ranks, pair = how

    def arrive() -> None:
        data = fetch()
        for rank in [None] if ranks is None else ranks:
            to = address if rank is None else address & OFFSET | rank << 24
            block = cluster.block(to, "TMA load")
            at = tensor_map.places(to & OFFSET, data.size)
            block.memory.write_by_proxy(at, data, "TMA load")
            cluster.barrier(_signalled(bar, rank, pair)).complete(data.size)

    return arrive


def _signalled(bar: int, rank: int | None, pair: bool) -> int:
    """The barrier of a destination: its own one, or with pairs the one on the named one's side."""
    if rank is None:
        return bar
    side = rank & ~1 | (bar >> 24 & 1) if pair else rank
    return bar & OFFSET | side << 24


def bulk_load(instruction: Instruction, layout: Layout) -> Handler:
    """cp.async.bulk to shared memory: consecutive bytes."""
    if "mbarrier::complete_tx::bytes" not in instruction.opcode:
        raise Unsupported(instruction.text)
    if "multicast" in instruction.opcode:
        raise Unsupported(instruction.text)
    target, source, size, barrier = instruction.operands[:4]
    where = layout.address(target)
    whence = layout.address(source)
    count = layout.source(size, "u32")
    signal = layout.address(barrier)

    def run(warp: "Warp", mask: Mask) -> None:
        cluster = warp.block.cluster
        to = only(where(warp), mask)
        start = only(whence(warp), mask)
        length = only(count(warp), mask)
        bar = only(signal(warp), mask)
        if (to | start | length) % 16:
            raise BadDescriptor(f"bulk copy not in units of 16 bytes: {warp}")

        def arrive() -> None:
            data = cluster.memory.view(start, length, "bulk copy")
            at = (to & OFFSET) + np.arange(length)
            cluster.block(to, "bulk copy").memory.write_by_proxy(at, data, "bulk copy")
            cluster.barrier(bar).complete(length)

        cluster.asynchronous.add(arrive)

    return run


def _copy(instruction: Instruction, layout: Layout) -> Handler:
    destination = next((p for p in instruction.parts if p.startswith(("shared", "global"))), "")
    if not destination.startswith("shared"):
        raise Unsupported(instruction.text)
    build = load if "tensor" in instruction.parts else bulk_load
    return build(instruction, layout)


BUILDS: dict[str, Build] = {"cp.async.bulk": _copy}
