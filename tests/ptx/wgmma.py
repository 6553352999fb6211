"""wgmma: products of a warpgroup with the sums in registers, the first operand there or not."""

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.ptx import tensor_core
from tests.ptx.convergence import common, whole
from tests.ptx.descriptors import SharedMatrix
from tests.ptx.faults import BadDescriptor, Unsupported
from tests.ptx.memory import SharedMemory
from tests.ptx.mma import rows_of_a
from tests.ptx.operands import Layout
from tests.ptx.rows import LANES, Array, Mask
from tests.ptx.scalar import Build, Handler, constant, nothing
from tests.ptx.syntax import Instruction, Register, Vector
from tests.ptx.warp import Wait, Warp

if TYPE_CHECKING:
    from tests.ptx.cluster import Cluster

_WARPS = 4
# Columns of a, and rows of b, in every product.
_DEPTH = 16


class Products:
    """The products of a warp: committed groups, oldest first, and those not yet committed."""

    def __init__(self) -> None:
        self.open: list[Product] = []
        self.committed: list[list[Product]] = []


class Form(NamedTuple):
    """What the warps of a warpgroup issue alike. ``numbers``: the type of a and b; ``first``: the
    descriptor of a, 0 where registers hold it; ``turned``: rows of a and of b are across the summed
    dimension.
    """

    numbers: str
    columns: int
    first: int
    second: int
    turned: tuple[bool, bool]
    adds: bool


class Product:
    """One wgmma of a warpgroup; it can happen when all four warps have issued it."""

    def __init__(self, form: Form):
        self.form = form
        self.parts: dict[int, tuple[Warp, list[Register], list[Register]]] = {}
        self.done = False

    def run(self, cluster: "Cluster") -> None:
        """Adds a · b to the registers of all four warps."""
        numbers, columns, first, second, turned, adds = self.form
        memory = self.parts[0][0].block.memory
        codes = _operand(memory, second, columns, turned[1])
        if first:
            rows = _operand(memory, first, 16 * _WARPS, turned[0])
        else:
            words = [_words(self.parts[n][0], self.parts[n][2]) for n in range(_WARPS)]
            rows = np.concatenate([rows_of_a(part) for part in words])
        sums = [_sums(self.parts[n][0], self.parts[n][1]) for n in range(_WARPS)]
        c = np.concatenate(sums) if adds else np.zeros((16 * _WARPS, columns), np.float32)
        a, b = (tensor_core.CODES[numbers].factor(part) for part in (rows, codes))
        result = tensor_core.mma_16_bit(c, a, b)
        for n in range(_WARPS):
            warp, targets, _ = self.parts[n]
            _set_sums(warp, targets, result[16 * n : 16 * n + 16])
        self.done = True


def _operand(memory: SharedMemory, descriptor: int, size: int, turned: bool) -> Array:
    """16-bit codes ``[size, 16]``; ``turned``: from rows of ``size`` codes."""
    matrix = SharedMatrix.of_wgmma(descriptor)
    if turned:
        codes = matrix.across(memory, _DEPTH, 2 * size, "wgmma").view(np.uint16).T
        return np.ascontiguousarray(codes)
    return matrix.rows(memory, size, 2 * _DEPTH, "wgmma").view(np.uint16)


def _words(warp: Warp, registers: list[Register]) -> Array:
    return np.array([warp.rows["u32", _row(warp, r)] for r in registers])


def _row(warp: Warp, register: Register) -> int:
    return warp.program.layout.places[register][1]


def _sums(warp: Warp, registers: list[Register]) -> Array:
    return sums_of_registers(np.array([warp.rows["f32", _row(warp, r)] for r in registers]))


def sums_of_registers(values: Array) -> Array:
    """float32 ``[16, N]`` of a warp's registers ``[N / 2, 32]``: register 4i + 2j + k of lane l is
    row l / 4 + 8j, column 8i + 2 (l % 4) + k.
    """
    return values.reshape(-1, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(16, -1)


def _set_sums(warp: Warp, registers: list[Register], sums: Array) -> None:
    values = sums.reshape(2, 8, -1, 4, 2).transpose(2, 0, 4, 1, 3).reshape(-1, LANES)
    for register, value in zip(registers, values, strict=True):
        warp.rows["f32", _row(warp, register)][:] = value


def _registers(operand: object) -> list[Register]:
    assert isinstance(operand, Vector)
    found = [item for item in operand.items if isinstance(item, Register)]
    assert len(found) == len(operand.items)
    return found


def _multiply(instruction: Instruction, layout: Layout) -> Handler:
    shape = re.search(r"\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2$", instruction.opcode)
    operands = instruction.operands
    if shape is None:
        raise Unsupported(instruction.text)
    columns = int(shape[1])
    targets = _registers(operands[0])
    in_registers = isinstance(operands[1], Vector)
    sources = _registers(operands[1]) if in_registers else []
    first = None if in_registers else layout.source(operands[1], "u64")
    second = layout.source(operands[2], "u64")
    adds = layout.source(operands[3], "pred")
    signs_and_turns = [constant(instruction, n) for n in range(4, len(operands))]
    signs, turns = signs_and_turns[:2], signs_and_turns[2:]
    if signs != [1, 1]:
        raise Unsupported(f"{instruction.text}: signs")
    turned = bool(turns[0]) and not in_registers, bool(turns[-1])

    def run(warp: Warp, mask: Mask) -> None:
        whole(warp, mask, "wgmma")
        form = Form(
            shape[2],
            columns,
            common(first(warp), True) if first else 0,
            common(second(warp), True),
            turned,
            bool(common(adds(warp), True)),
        )
        product = _join(warp, form)
        product.parts[warp.index % _WARPS] = (warp, targets, sources)
        products(warp).open.append(product)
        warp.written.update(dict.fromkeys(targets, "wgmma"))
        warp.read.update(dict.fromkeys(sources, "wgmma"))
        if len(product.parts) == _WARPS:
            cluster = warp.block.cluster
            line = ("wgmma", warp.block.rank, warp.index // _WARPS)
            cluster.asynchronous.add_in_order(line, lambda: product.run(cluster))

    return run


def _join(warp: Warp, form: Form) -> Product:
    """The product that the warpgroup's other warps have issued at this point, or a new one."""
    key = ("wgmma", warp.index // _WARPS)
    unfinished: list[Product] = warp.block.state.setdefault(key, [])
    for other in unfinished:
        if warp.index % _WARPS not in other.parts:
            if other.form != form:
                raise BadDescriptor(f"wgmma differs between the warps of a warpgroup: {warp}")
            if len(other.parts) == _WARPS - 1:
                unfinished.remove(other)
            return other
    product = Product(form)
    unfinished.append(product)
    return product


def products(warp: Warp) -> Products:
    """The products of a warp."""
    return warp.state.setdefault("wgmma", Products())


def _commit(instruction: Instruction, layout: Layout) -> Handler:
    def run(warp: Warp, mask: Mask) -> None:
        own = products(warp)
        own.committed.append(own.open)
        own.open = []

    return run


def _wait(instruction: Instruction, layout: Layout) -> Handler:
    newest = constant(instruction, 0)

    def run(warp: Warp, mask: Mask) -> Wait | None:
        own = products(warp)
        older = own.committed[: max(len(own.committed) - newest, 0)]

        def ended() -> bool:
            return all(product.done for group in older for product in group)

        if not ended():
            return ended
        own.committed = own.committed[len(older) :]
        _release(warp, own)
        return None

    return run


def _release(warp: Warp, own: Products) -> None:
    """Only the products that may not have happened keep their registers."""
    warp.written.clear()
    warp.read.clear()
    for group in (*own.committed, own.open):
        for product in group:
            _, targets, sources = product.parts[warp.index % _WARPS]
            warp.written.update(dict.fromkeys(targets, "wgmma"))
            warp.read.update(dict.fromkeys(sources, "wgmma"))


BUILDS: dict[str, Build] = {
    "wgmma.mma_async": _multiply,
    "wgmma.commit_group": _commit,
    "wgmma.wait_group": _wait,
    "wgmma.fence": nothing,
}
