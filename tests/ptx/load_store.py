"""ld, st, ldmatrix and stmatrix."""

import re
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.faults import Misaligned, OutOfBounds, Unsupported
from tests.ptx.memory import bytes_at
from tests.ptx.operands import LOCAL, PARAMETERS, SHARED, Layout
from tests.ptx.rows import DTYPES, LANES, Array, Mask, lanes
from tests.ptx.scalar import Build, Handler, nothing
from tests.ptx.syntax import Instruction, Vector

if TYPE_CHECKING:
    from tests.ptx.warp import Warp

_SPACES = ("global", "shared", "param", "const", "local")


def state_space(instruction: Instruction) -> str:
    """The state space that an instruction names."""
    for part in instruction.parts[1:]:
        if part.partition("::")[0] in _SPACES:
            return part.partition("::")[0]
    return "generic"


def _count(instruction: Instruction) -> int:
    found = [int(part[1]) for part in instruction.parts if re.fullmatch(r"v[248]", part)]
    return found[0] if found else 1


def _load(instruction: Instruction, layout: Layout) -> Handler:
    space = state_space(instruction)
    count = _count(instruction)
    ptx_type = instruction.parts[-1]
    dtype = np.dtype(DTYPES[ptx_type])
    result, address = instruction.operands[:2]
    targets = result.items if isinstance(result, Vector) else (result,)
    writes = [layout.target(target, ptx_type) for target in targets]
    assert len(writes) == count
    size = count * dtype.itemsize
    where = layout.address(address)

    def run(warp: "Warp", mask: Mask) -> None:
        if mask is True and space != "local":
            raw = read(warp, space, where(warp), size)
        else:
            active = lanes(mask)
            raw = np.zeros((LANES, size), np.uint8)
            if space == "local":
                raw[active] = warp.local[_own(warp, active, where(warp), size)]
            else:
                raw[active] = read(warp, space, where(warp)[active], size)
        values = raw.view(dtype)
        for n, write in enumerate(writes):
            write(warp, values[:, n], mask)

    return run


def _own(warp: "Warp", active: Array, addresses: Array, size: int) -> tuple[Array, Array]:
    """The indices in the warp's local memory of bytes that its active lanes have there."""
    at = addresses[active].astype(np.int64) - LOCAL
    if (at % size).any():
        raise Misaligned(f"{warp}: {size} bytes of local memory at {int(at[0])}")
    if at.min() < 0 or at.max() + size > warp.local.shape[1]:
        raise OutOfBounds(f"{warp}: local memory {int(at.min())} to {int(at.max()) + size}")
    return np.flatnonzero(active)[:, None], bytes_at(at, size)


def _check_aligned(warp: "Warp", addresses: Array, size: int) -> None:
    """``size``: a power of two."""
    if int(np.bitwise_or.reduce(addresses)) & (size - 1):
        raise Misaligned(f"{warp}: {size} bytes at {int(addresses[0]):#x}")


def read(warp: "Warp", space: str, addresses: Array, size: int) -> Array:
    """uint8 ``[n, size]``: the bytes at n addresses of a state space."""
    _check_aligned(warp, addresses, size)
    cluster = warp.block.cluster
    if space == "generic" and addresses[0] >= SHARED:
        in_process = addresses[0] >= SHARED + (1 << 32)
        space = "global" if in_process else "shared"
        addresses = addresses if in_process else addresses - np.uint64(SHARED)
    if space == "shared":
        memory, first = cluster.shared(addresses, size, warp)
        return memory.read(first, size)
    if space in ("param", "generic") and addresses[0] >= PARAMETERS:
        low = addresses.astype(np.int64) - PARAMETERS
        if low.min() >= 0 and low.max() + size <= cluster.parameters.size:
            return cluster.parameters[bytes_at(low, size)]
    return cluster.memory.gather(addresses, size, warp)


def _store(instruction: Instruction, layout: Layout) -> Handler:
    space = state_space(instruction)
    count = _count(instruction)
    ptx_type = instruction.parts[-1]
    dtype = np.dtype(DTYPES[ptx_type])
    address, value = instruction.operands[:2]
    sources = value.items if isinstance(value, Vector) else (value,)
    plain = f"b{8 * dtype.itemsize}"
    reads = [layout.source(source, plain) for source in sources]
    assert len(reads) == count
    if space not in ("global", "shared", "local", "generic"):
        raise Unsupported(instruction.text)
    where = layout.address(address)
    send = _write_later if "relaxed" in instruction.parts and space == "global" else write

    def run(warp: "Warp", mask: Mask) -> None:
        values = np.stack([source(warp) for source in reads], -1).view(np.uint8)
        if mask is True and space != "local":
            send(warp, space, where(warp), values)
            return
        active = lanes(mask)
        if space == "local":
            warp.local[_own(warp, active, where(warp), values.shape[1])] = values[active]
            return
        send(warp, space, where(warp)[active], values[active])

    return run


def _write_later(warp: "Warp", space: str, addresses: Array, values: Array) -> None:
    """Relaxed stores: others see each lane's when the schedule wants, those to one address in their
    order. So does the lane itself, which the ISA would let see it at once.
    """
    for n in range(len(addresses)):
        one = slice(n, n + 1)
        event = partial(write, warp, space, addresses[one].copy(), values[one].copy())
        line = ("relaxed", int(addresses[n]))
        warp.block.cluster.asynchronous.add_in_order(line, event)


def write(warp: "Warp", space: str, addresses: Array, values: Array) -> None:
    """Writes uint8 ``[n, size]`` to n addresses of a state space."""
    size = values.shape[1]
    _check_aligned(warp, addresses, size)
    cluster = warp.block.cluster
    cluster.progress += 1
    if space == "generic" and SHARED <= addresses[0] < SHARED + (1 << 32):
        space = "shared"
        addresses = addresses - np.uint64(SHARED)
    if space == "shared":
        memory, first = cluster.shared(addresses, size, warp)
        memory.write(first, values, warp.index)
        return
    cluster.memory.scatter(addresses, values, warp)


def matrix_rows(words: Array, transposed: bool) -> Array:
    """uint16 ``[8, 8]`` of a warp's register, uint32 ``[32]``.

    Lane l holds the elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, or of column l / 4 if
    transposed.
    """
    matrix = words.copy().view(np.uint16).reshape(8, 8)
    return np.ascontiguousarray(matrix.T if transposed else matrix)


def matrix_words(rows: Array, transposed: bool) -> Array:
    """What ``matrix_rows`` makes rows of: uint32 ``[32]``."""
    matrix = np.ascontiguousarray(rows.T if transposed else rows)
    return matrix.reshape(-1).view(np.uint32)


def _load_matrix(instruction: Instruction, layout: Layout) -> Handler:
    """ldmatrix.m8n8.b16: row r of matrix j comes from the address in lane 8j + r."""
    if "m8n8" not in instruction.parts or instruction.parts[-1] != "b16":
        raise Unsupported(instruction.text)
    transposed = "trans" in instruction.parts
    value, address = instruction.operands
    targets = value.items if isinstance(value, Vector) else (value,)
    writes = [layout.target(target, "b32") for target in targets]
    where = layout.address(address)

    def run(warp: "Warp", mask: Mask) -> None:
        addresses = where(warp)
        for j, write_target in enumerate(writes):
            rows = read(warp, "shared", addresses[8 * j : 8 * j + 8], 16).view(np.uint16)
            write_target(warp, matrix_words(rows.reshape(8, 8), transposed), mask)

    return run


def _store_matrix(instruction: Instruction, layout: Layout) -> Handler:
    """stmatrix.m8n8.b16: matrix j's row r goes to the address in lane 8j + r."""
    if "m8n8" not in instruction.parts or instruction.parts[-1] != "b16":
        raise Unsupported(instruction.text)
    transposed = "trans" in instruction.parts
    address, value = instruction.operands
    sources = value.items if isinstance(value, Vector) else (value,)
    reads = [layout.source(source, "b32") for source in sources]
    where = layout.address(address)

    def run(warp: "Warp", mask: Mask) -> None:
        addresses = where(warp)
        for j, source in enumerate(reads):
            rows = matrix_rows(source(warp), transposed)
            write(warp, "shared", addresses[8 * j : 8 * j + 8], rows.view(np.uint8))

    return run


def _fence(instruction: Instruction, layout: Layout) -> Handler:
    """fence.proxy.async makes a thread's writes visible to copies and products."""
    if "proxy" not in instruction.parts or "async" not in instruction.parts[2]:
        return nothing(instruction, layout)

    def run(warp: "Warp", mask: Mask) -> None:
        warp.block.memory.fence(warp.index)

    return run


def map_to_block(instruction: Instruction, layout: Layout) -> Handler:
    """mapa: the address of the same variable in another block of the cluster."""
    ptx_type = instruction.parts[-1]
    address = layout.source(instruction.operands[1], ptx_type)
    rank = layout.source(instruction.operands[2], "u32")
    write_target = layout.target(instruction.operands[0], ptx_type)
    dtype = DTYPES[ptx_type]

    def run(warp: "Warp", mask: Mask) -> None:
        of_rank = rank(warp).astype(dtype) << dtype(24)
        write_target(warp, (address(warp) & ~dtype(0xFF << 24)) | of_rank, mask)

    return run


BUILDS: dict[str, Build] = {
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "ldmatrix": _load_matrix,
    "stmatrix": _store_matrix,
    "fence": _fence,
    "membar": nothing,
    "mapa": map_to_block,
    "prefetch": nothing,
    "prefetchu": nothing,
    "cp.async.bulk.prefetch": nothing,
}
