"""What undoes, or completes, a block that an error or an interruption ends."""

from collections.abc import Callable
from types import TracebackType


class OnFailure:
    """``action(*arguments)`` where the block does not come to its end, behind which what has ended
    it goes on.

    No generator: one that a signal leaves suspended would act when its traceback is freed, on
    whatever there is by then.
    """

    def __init__(self, action: Callable[..., object], *arguments: object) -> None:
        self._action = action
        self._arguments = arguments

    def __enter__(self) -> None:
        """Nothing happens."""

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is not None:
            self._action(*self._arguments)
