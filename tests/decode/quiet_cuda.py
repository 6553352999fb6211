"""Stand-ins for streams and events of the only device, on which nothing runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch


class Quiet:
    """A stream or an event."""

    def __init__(self, *_: object) -> None:
        """Any device."""

    def record(self, *_: object) -> None:
        """Nothing runs."""

    wait_event = synchronize = record


def quiet_cuda(
    monkeypatch: pytest.MonkeyPatch,
    stream: Callable[[object], AbstractContextManager[None]] = lambda stream: nullcontext(),
) -> None:
    """Puts them in the place of torch's; ``stream`` in that of the block on a stream."""
    for name, stand_in in (
        ("Stream", Quiet),
        ("Event", Quiet),
        ("graph_pool_handle", lambda: (0, 0)),
        ("current_stream", Quiet),
        ("synchronize", lambda device: None),
        ("stream", stream),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
