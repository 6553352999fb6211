"""Steps that an interruption ends between two of their parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dsv4.step.step import Step


@contextmanager
def interrupted_behind(parts: int) -> Iterator[None]:
    """Inside the block a KeyboardInterrupt comes in front of the part behind so many, those of all
    ranks counted, and ends the block.
    """
    run_part = Step.run_part
    left = iter(range(parts))

    def run(step: Step, *arguments: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        run_part(step, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "run_part", run)
        with pytest.raises(KeyboardInterrupt):
            yield
