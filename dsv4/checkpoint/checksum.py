"""A checksum of memory, computed on the device that holds it."""

import torch
from torch import Tensor

from dsv4.integers import ceil_div

_WORD = 8
_CHUNK_WORDS = 8 << 20
# Odd numbers: of the splitmix64 generator, as signed ones.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTOR = 0xBF58476D1CE4E5B9 - 2**64


def checksum(memory: Tensor) -> int:
    """``queued_checksum``, waited for."""
    return as_unsigned(int(queued_checksum(memory)))


def as_unsigned(value: int) -> int:
    """The 64 bits of an int64."""
    return value % 2**64


def queued_checksum(memory: Tensor) -> Tensor:
    """64 bits of uint8 ``[bytes]`` as int64 ``[]`` on their device: the sum, modulo 2^64, of all
    words of 8 bytes, each mixed with its place; missing bytes of the last one are zero.

    It is the same on every device and finds damage, a word in another place, and zeros for data. It
    is no protection against whoever makes a file to fit. Takes 192 MiB beside the memory.
    """
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    chunk_bytes = _CHUNK_WORDS * _WORD
    most = min(_CHUNK_WORDS, ceil_div(memory.numel(), _WORD))
    places = torch.arange(1, 1 + most, dtype=torch.int64, device=memory.device).mul_(_STEP)
    for chunk, start in enumerate(range(0, memory.numel(), chunk_bytes)):
        part = memory[start : start + chunk_bytes]
        if part.numel() % _WORD:
            part = torch.nn.functional.pad(part, (0, -part.numel() % _WORD))
        mixed = part.view(torch.int64) + places[: part.numel() // _WORD]
        mixed.add_(_signed(chunk * _CHUNK_WORDS * _STEP))
        mixed.bitwise_xor_(mixed >> 29)
        mixed.mul_(_FACTOR)
        mixed.bitwise_xor_(mixed >> 32)
        total += mixed.sum()
    return total


def _signed(value: int) -> int:
    """The int64 that ``value`` is modulo 2^64."""
    return (value + 2**63) % 2**64 - 2**63
