"""The machine code of a launch and its shape."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Defines = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Kernel:
    """An entry of ``dsv4/ops/<source>.cu``, compiled with ``defines``. ``source``:
    ``"<op>/<stem>"``.
    """

    source: str
    function: str
    defines: Defines = ()


@dataclass(frozen=True)
class Shape:
    """How a kernel is launched: blocks (x, or x, y, z), threads per block, dynamic shared memory,
    blocks per cluster.

    ``numbers``: arguments by name that go with the shape, where it depends on the number of tokens.
    ``settles``: it lets the next kernel start behind its own wait, when everything in front of it
    is complete (``dsv4.launch.settled``).
    """

    kernel: Kernel
    blocks: int | tuple[int, ...]
    threads: int
    shared_bytes: int = 0
    cluster: int = 1
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    settles: bool = False

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks along x, y and z."""
        blocks = self.blocks if isinstance(self.blocks, tuple) else (self.blocks,)
        x, y, z = (*blocks, 1, 1)[:3]
        return x, y, z
