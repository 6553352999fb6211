"""What an op finds out once: that its inputs fit, and the launches that it makes of them.

All of it depends on how tensors lie in memory and on weights and caches, never on values, so a step need not find out
again what the last one of its length did.
"""

from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

Found = TypeVar("Found")
# Per owner; prompts bring chunks of ever new lengths.
_MOST_LAYOUTS = 32


def layouts(*tensors: Tensor) -> tuple[Hashable, ...]:
    """What is checked of tensors and planned for: equal for those that differ in values and address alone."""
    return tuple([(t.dtype, t.device, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors])


def remembered(
    owner: object, parts: tuple[object, ...], key: Hashable, find: Callable[..., Found], *arguments: object
) -> Found:
    """What ``find(*arguments)`` returned the first time for these ``parts`` (which count by identity) and this ``key``.

    ``owner`` and parts are weights and caches: frozen values whose tensors stay where they are. The owner itself keeps
    what was found, of the last 32 keys, so that it is gone with it; it can no longer be copied deeply.
    """
    found = vars(owner).setdefault("_remembered", {})
    identity = (find, *map(id, parts), key)
    entry = found.get(identity)
    if entry is None:
        if len(found) == _MOST_LAYOUTS:
            del found[next(iter(found))]
        # Kept with the parts: nothing else can get their ids.
        entry = found[identity] = find(*arguments), parts
    return entry[0]
