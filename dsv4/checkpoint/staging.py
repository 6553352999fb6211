"""How much is read at once, and the memory that it takes."""

import os

import torch

from dsv4.integers import ceil_div

# Of one buffer: all of them together stay in the processor's cache, and the interpreter has time
# for what it does for each.
STAGING_BYTES = 8 << 20
# Those that are copied while all others are read into.
MORE_BUFFERS = 4
MAX_READERS = 16
# Cores that readers leave to what queues copies and to what packs weights.
_OTHER_CORES = 2
# Room behind what was read, for the table of its parts.
TABLE_BYTES = 1 << 16
# Buffers of as many bytes on a GPU, which what was read passes on its way to the weights.
LANES = 3


def reader_count() -> int:
    """How many spans are read at once: the threads of a large machine are more than its memory can
    feed.
    """
    return min(MAX_READERS, max(2, (os.cpu_count() or 1) - _OTHER_CORES))


def staging_bytes(total: int) -> int:
    """The memory of the host that ``total`` bytes of a load pass."""
    readers = min(reader_count(), ceil_div(total, STAGING_BYTES))
    return (readers + MORE_BUFFERS) * _buffer_bytes(total)


def staging_on(device: torch.device, total: int) -> int:
    """What a load of ``total`` bytes takes on a device beside weights: on the CPU all buffers, on a
    GPU those of its lanes.
    """
    if device.type != "cuda":
        return staging_bytes(total)
    return LANES * _buffer_bytes(total)


def _buffer_bytes(total: int) -> int:
    return min(total, STAGING_BYTES) + TABLE_BYTES
