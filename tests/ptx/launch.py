"""What a host function asks the driver to run."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launch:
    """One kernel launch; ``parameters`` are the bytes of each kernel parameter.

    ``programmatic``: the launch may start before the kernel in front of it has ended (PDL).
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: tuple[bytes, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    programmatic: bool = False
    attributes: dict[int, bytes] = field(default_factory=dict)
