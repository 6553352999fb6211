"""Channels of a test."""

from typing import Any

import torch

from dsv4.channels import Channel, Channels
from dsv4.turns import Turns

CPU = torch.device("cpu")
SENDER = torch.device("cuda", 0)
RECEIVER = torch.device("cuda", 1)


def channel_on_cpu(words: int, use: int = 1) -> Channel:
    """From one GPU to another, in memory of the CPU. ``use``: the number of the next one."""
    counts = [torch.full((1,), use << 32, dtype=torch.int64) for _ in range(2)]
    fault_4 = torch.zeros(4, dtype=torch.int32)
    words_W = torch.zeros(words, dtype=torch.int64)
    return Channel(SENDER, RECEIVER, words_W, counts[0], counts[1], fault_4)


def channels_on_cpu(words: int = 8) -> Channels:
    """In both directions."""
    memory = {
        ends: torch.zeros(words, dtype=torch.int64)
        for ends in ((SENDER, RECEIVER), (RECEIVER, SENDER))
    }
    return Channels(memory, Turns((SENDER, RECEIVER)))


def lost_words() -> Channels:
    """Words of cuda:3 for cuda:1 did not come: a kernel has given up waiting for them."""
    channels = channels_on_cpu()
    channels.fault_4.copy_(torch.tensor([1, 3, 1, 77]))
    return channels


def wait_for_trapped(*_: object) -> Any:
    """What waiting for a device is where a kernel has given up."""
    raise torch.AcceleratorError("unspecified launch failure")
