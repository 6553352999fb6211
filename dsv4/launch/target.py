"""The facts about a GPU that a recording for it depends on: a value that needs no GPU."""

from dataclasses import dataclass

import torch

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")


@dataclass(frozen=True)
class Target:
    """A device, its compile target and how many streaming multiprocessors it has."""

    device: torch.device
    architecture: str
    multiprocessors: int

    @classmethod
    def of_absent(cls, device: torch.device) -> "Target":
        """What a plan takes a GPU for that is not on this machine: an H200."""
        return cls(device, "sm_90a", 132)

    @classmethod
    def of(cls, device: torch.device) -> "Target":
        """The target of a CUDA device of this machine; ``RuntimeError`` for one without a compile
        target.
        """
        properties = torch.cuda.get_device_properties(device)
        architecture = compile_target(properties.major, properties.minor)
        if architecture is None:
            found = f"compute capability {properties.major}.{properties.minor}"
            raise RuntimeError(f"{device}: found {found}, expected one of {ARCHITECTURES}")
        return cls(device, architecture, properties.multi_processor_count)


def compile_target(major: int, minor: int) -> str | None:
    """The architecture of ``ARCHITECTURES`` for a compute capability, if there is one."""
    architecture = f"sm_{major}{minor}a"
    return architecture if architecture in ARCHITECTURES else None
