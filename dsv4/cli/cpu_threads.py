"""How many CPU threads a run is worth."""

import torch

from dsv4.config import ModelConfig

SMALL_HIDDEN_SIZE = 1024


def limit_cpu_threads(config: ModelConfig) -> None:
    """Gives a small model one thread for the whole process; a large one keeps torch's default.

    A step of a small model is hundreds of operations of microseconds. Threads that wait for one
    another in each of them gain little on an idle machine and, measured on a busy one with two
    cores, cost a factor of forty.
    """
    if config.hidden_size < SMALL_HIDDEN_SIZE:
        torch.set_num_threads(1)
