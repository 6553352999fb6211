"""What is complete when a kernel starts, before it waits for the kernel in front of it.

A kernel of a step starts when every block of the one in front has let it (``pdl_launch``), and then
waits until that one is complete (``pdl_wait``), and with it all before. What it reads before its
wait may still be written by the kernel in front or, where that one let it start early, by those
before. But a kernel that lets the next one start behind its own wait *settles*: all items in front
of it are complete by then. So what was written before an item that settles may be read early. And
nothing starts before a call in front of it is complete (``dsv4.launch.program``).
"""

from collections.abc import Sequence

from dsv4.launch.items import Call, Item


def is_settled(items: Sequence[Item], buffers: set[int]) -> bool:
    """Whether ``buffers``, by their storage keys, are complete when an item behind these starts."""
    if not buffers:
        return True
    for item in reversed(items):
        if isinstance(item, Call):
            return True
        if not buffers.isdisjoint(item.written_storages):
            return False
        if item.settles:
            return True
    return True
