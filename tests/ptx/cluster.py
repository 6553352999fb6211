"""The blocks of a cluster, executed together."""

from typing import Any

import numpy as np

from tests.ptx.asynchronous import Asynchronous
from tests.ptx.barriers import Barrier, NamedBarrier
from tests.ptx.faults import (
    BadDescriptor,
    Deadlock,
    EndedBlock,
    NoBarrier,
    NotFreed,
    OutOfBounds,
    RegisterBudget,
)
from tests.ptx.launch import Launch
from tests.ptx.memory import GlobalMemory, SharedMemory
from tests.ptx.operands import PARAMETERS
from tests.ptx.program import Program
from tests.ptx.rows import LANES, Array
from tests.ptx.schedule import Choices
from tests.ptx.tensor_map import TensorMap
from tests.ptx.tensor_memory import TensorMemory
from tests.ptx.tma import OFFSET
from tests.ptx.warp import Warp

_AXES = "xyz"
# Waits that may end without what they wait for end this often, with nothing else happening, before
# it is a deadlock: between two looks at memory a warp may wait more than once.
_LOOKS = 64


class Block:
    """A block: its warps, shared memory and tensor memory."""

    def __init__(self, cluster: "Cluster", rank: int):
        self.cluster = cluster
        self.rank = rank
        self.index = (0, 0, 0)
        program = cluster.program
        launch = cluster.launch
        self.memory = SharedMemory(program.layout.shared_bytes + launch.shared_bytes)
        threads = int(np.prod(launch.block))
        self.tensor_memory = TensorMemory()
        self.named: dict[int, NamedBarrier] = {}
        self.free_registers = 0
        self.running_warps = 0
        self.state: dict[Any, Any] = {}
        self.warps = [Warp(self, n, program) for n in range(-(-threads // LANES))]

    def start(self, index: tuple[int, int, int]) -> None:
        """Everything as at the launch of the block with an index in the grid."""
        self.index = index
        self.memory.reset()
        self.tensor_memory.reset()
        self.named.clear()
        self.state.clear()
        self.free_registers = 0
        self.running_warps = len(self.warps)
        for warp in self.warps:
            warp.start()

    def named_barrier(self, number: int) -> NamedBarrier:
        """The barrier of a number."""
        return self.named.setdefault(number, NamedBarrier())

    def live_threads(self) -> int:
        """Threads that have not ended."""
        return sum(int(warp.living().sum()) for warp in self.warps)

    def readable_memory(self, what: str) -> SharedMemory:
        """Its shared memory, which exists as long as the block."""
        if self.ended:
            raise EndedBlock(f"{what}: shared memory of block {self.rank}, which has ended")
        return self.memory

    @property
    def ended(self) -> bool:
        """Whether all of its warps have ended."""
        return self.running_warps == 0

    def special(self, name: str, warp: int) -> Any:
        """A special register in the lanes of a warp."""
        base, _, axis = name.removeprefix("%").partition(".")
        launch = self.cluster.launch
        if base == "tid":
            x, y, _ = launch.block
            thread = warp * LANES + np.arange(LANES)
            return (thread % x, thread // x % y, thread // (x * y))[_AXES.index(axis)]
        if not axis:
            return self._scalar(base, warp)
        sizes = {
            "ntid": launch.block,
            "nctaid": launch.grid,
            "ctaid": self.index,
            "cluster_nctaid": launch.cluster,
            "cluster_ctaid": tuple(i % c for i, c in zip(self.index, launch.cluster, strict=True)),
            "clusterid": tuple(i // c for i, c in zip(self.index, launch.cluster, strict=True)),
            "nclusterid": tuple(g // c for g, c in zip(launch.grid, launch.cluster, strict=True)),
        }
        return sizes[base][_AXES.index(axis)]

    def _scalar(self, name: str, warp: int) -> Any:
        return {
            "laneid": np.arange(LANES),
            "warpid": warp,
            "nwarpid": len(self.warps),
            "cluster_ctarank": self.rank,
            "cluster_nctarank": len(self.cluster.blocks),
            "is_explicit_cluster": 1,
            "dynamic_smem_size": self.cluster.launch.shared_bytes,
        }[name]


class Cluster:
    """The blocks that run together; used again for every cluster of a grid."""

    def __init__(self, program: Program, launch: Launch, memory: GlobalMemory, choices: Choices):
        self.program = program
        self.launch = launch
        self.memory = memory
        self.choices = choices
        self.parameters = _parameters(program, launch)
        # Which of the active lanes elect.sync takes, from 0 for the first to 1 for the last.
        self.elected = choices.one((0.0, 1.0))
        # Which of the diverged lanes of a warp go on.
        self.last_lanes_first = choices.one((False, True))
        self.executed = 0
        self.maps: dict[int, TensorMap] = {}
        self.blocks: list[Block] = []
        self.blocks.extend(Block(self, rank) for rank in range(int(np.prod(launch.cluster))))

    def run(self, corner: tuple[int, int, int]) -> None:
        """Executes the cluster whose first block has an index in the grid."""
        self.asynchronous = Asynchronous()
        self.barriers: dict[int, Barrier] = {}
        self.arrived: dict[Warp, Array] = {}
        self.phase = 0
        # Grows with everything that another warp could wait for.
        self.progress = 0
        sizes = self.launch.cluster
        for block in self.blocks:
            inside = (
                block.rank % sizes[0],
                block.rank // sizes[0] % sizes[1],
                block.rank // (sizes[0] * sizes[1]),
            )
            x, y, z = (c + i for c, i in zip(corner, inside, strict=True))
            block.start((x, y, z))
        warps = [warp for block in self.blocks for warp in block.warps]
        for warp in warps:
            warp.priority = self.choices.priority()
        self._until_all_end(warps)
        while self.asynchronous:
            self.asynchronous.happen(self.choices)
        self._check_end()

    def _until_all_end(self, warps: list[Warp]) -> None:
        by_priority = self.choices.schedule.warps == "priority"
        timed_out_at, times = -1, 0
        while running := [warp for warp in warps if not warp.ended]:
            ready = [warp for warp in running if warp.blocked is None or warp.blocked()]
            if self.asynchronous and (not ready or self.choices.asynchronous_now()):
                self.asynchronous.happen(self.choices)
                self.progress += 1
            elif ready:
                if by_priority:
                    warp = max(ready, key=lambda warp: warp.priority)
                else:
                    warp = self.choices.one(ready)
                warp.blocked = None
                warp.run(self.choices.turn(), by_priority)
                if warp.ended:
                    self.end_phase()
            else:
                times = times + 1 if timed_out_at == self.progress else 0
                if times == _LOOKS or not any(warp.may_time_out for warp in running):
                    self._deadlock(running)
                timed_out_at = self.progress
                for warp in running:
                    if warp.may_time_out:
                        warp.timed_out = True
                        warp.blocked = None

    def _deadlock(self, running: list[Warp]) -> None:
        text = "; ".join(str(warp) for warp in running)
        starved = [
            warp
            for warp in running
            if self.program.steps[warp.pc].instruction.parts[0] == "setmaxnreg"
        ]
        if starved:
            free = starved[0].block.free_registers
            raise RegisterBudget(f"{free} registers are free and never enough: {text}")
        raise Deadlock(text)

    def _check_end(self) -> None:
        for block in self.blocks:
            if block.tensor_memory.allocated:
                raise NotFreed(f"block {block.index}: {block.tensor_memory.allocated} columns")

    def end_phase(self) -> None:
        """Ends the phase of the cluster barrier when every warp that lives has arrived."""
        if not self.arrived:
            return
        none = np.zeros(LANES, bool)
        if all(
            not (warp.living() & ~self.arrived.get(warp, none)).any()
            for block in self.blocks
            for warp in block.warps
        ):
            self.arrived = {}
            self.phase += 1
            self.progress += 1

    def block(self, address: int, what: object) -> Block:
        """The block whose shared memory an address names."""
        rank = address >> 24
        if rank >= len(self.blocks):
            raise OutOfBounds(f"{what}: shared address {address:#x} of block {rank}")
        if self.blocks[rank].ended:
            raise EndedBlock(f"{what}: shared memory of block {rank}, which has ended")
        return self.blocks[rank]

    def shared(self, addresses: Array, size: int, what: object) -> tuple[SharedMemory, Array]:
        """The memory that addresses name, all of one block, and where in it they are."""
        at = addresses.astype(np.int64)
        low, high = int(np.minimum.reduce(at)), int(np.maximum.reduce(at))
        if low >> 24 != high >> 24:
            raise OutOfBounds(f"{what}: shared memory of several blocks")
        memory = self.block(low, what).memory
        memory.check(low & OFFSET, (high & OFFSET) + size, what)
        return memory, at - (low & ~OFFSET)

    def barrier(self, address: int, warp: Warp | None = None) -> Barrier:
        """The mbarrier at a shared address."""
        if address not in self.barriers:
            raise NoBarrier(f"no mbarrier at shared address {address:#x}: {warp or ''}")
        self.block(address, warp or "mbarrier")
        return self.barriers[address]

    def set_barrier(self, address: int, count: int) -> None:
        """mbarrier.init."""
        memory = self.block(address, "mbarrier.init").memory
        memory.check(address & OFFSET, (address & OFFSET) + 8, "mbarrier.init")
        self.barriers[address] = Barrier(count, f"mbarrier at {address:#x}")

    def drop_barrier(self, address: int) -> None:
        """mbarrier.inval."""
        self.barrier(address)
        del self.barriers[address]

    def ranks(self, mask: int) -> list[int]:
        """The blocks of a multicast mask."""
        found = [rank for rank in range(16) if mask >> rank & 1]
        if not found or found[-1] >= len(self.blocks):
            raise OutOfBounds(f"multicast to blocks {found} of {len(self.blocks)}")
        return found

    def tensor_map(self, address: int) -> TensorMap:
        """The tensor map at a generic address."""
        if address not in self.maps:
            if address % 64:
                raise BadDescriptor(f"tensor map at {address:#x}, not a multiple of 64")
            self.maps[address] = TensorMap.decode(self._bytes(address, 128))
        return self.maps[address]

    def _bytes(self, address: int, size: int) -> bytes:
        start = address - PARAMETERS
        if start >= 0 and start + size <= self.parameters.size:
            return self.parameters[start : start + size].tobytes()
        return self.memory.view(address, size, "tensor map").tobytes()


def _parameters(program: Program, launch: Launch) -> Array:
    sizes = dict(program.function.parameters)
    if [len(value) for value in launch.parameters] != list(sizes.values()):
        raise BadDescriptor("the launch's parameters are not those of the kernel")
    end = max((program.layout.parameters[name] + size for name, size in sizes.items()), default=0)
    memory = np.full(end, 0xFF, np.uint8)
    for (name, size), value in zip(sizes.items(), launch.parameters, strict=True):
        at = program.layout.parameters[name]
        memory[at : at + size] = np.frombuffer(value, np.uint8)
    return memory
