"""The facts about a GPU that a recording for it depends on: a value that needs no GPU."""

from dataclasses import dataclass

import torch

from dsv4.launch.occupancy import count_clusters

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")


@dataclass(frozen=True)
class Target:
    """A device, its compile target and how many streaming multiprocessors it has.

    ``clusters``: (blocks, clusters) as the driver counts them, of sizes that it was asked for.
    """

    device: torch.device
    architecture: str
    multiprocessors: int
    clusters: tuple[tuple[int, int], ...] = ()

    def resident_clusters(self, blocks: int) -> int:
        """How many clusters of 1 to 8 blocks run at once, where every block fills a multiprocessor.

        Without a count it is a guess: a cluster lies in one GPC, whose multiprocessors come in
        pairs and need not be a multiple of 4 or 8, so that 1 cluster of 4 and 2 of 8 are taken to
        find no place. That is 66, 32 and 14 clusters of 2, 4 and 8 for an H200; 74, 36 and 16 for
        148 multiprocessors. Too few waste some of the GPU, one too many takes a second wave.
        """
        guess = self.multiprocessors // blocks - blocks // 4
        return dict(self.clusters).get(blocks, guess)

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
        clusters = count_clusters(device, architecture)
        return cls(device, architecture, properties.multi_processor_count, clusters)


def compile_target(major: int, minor: int) -> str | None:
    """The architecture of ``ARCHITECTURES`` for a compute capability, if there is one."""
    architecture = f"sm_{major}{minor}a"
    return architecture if architecture in ARCHITECTURES else None
