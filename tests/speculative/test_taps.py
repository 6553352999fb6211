"""What a module reads is kept, and everything goes on to whoever traces the step."""

from typing import Any

import torch

from dsv4.speculative.taps import Taps


class Sink:
    """Wants ``b`` and notes what it gets."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def wants(self, name: str) -> bool:
        return name == "b"

    def value(self, *given: Any) -> None:
        self.seen.append(given)

    def compute(self, *given: Any) -> torch.Tensor:
        raise AssertionError("the module reads results of ops")


def test_taps_keep_the_module_s_values_and_pass_all_on() -> None:
    sink: Any = Sink()
    taps = Taps(["a"], sink)
    assert [taps.wants(name) for name in "abc"] == [True, True, False]
    a_1, b_1 = torch.zeros(1), torch.ones(1)
    taps.value("a", a_1, 4)
    taps.value("b", b_1)
    assert taps.found == {"a": a_1}
    assert sink.seen == [("a", a_1, 4), ("b", b_1, 1)]
