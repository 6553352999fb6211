"""What undoes, or completes, a block that an error or an interruption ends."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def on_failure(action: Callable[..., object], *arguments: object) -> Iterator[None]:
    """``action(*arguments)`` where the block does not come to its end, behind which what has ended
    it goes on.
    """
    with ExitStack() as stack:
        stack.callback(action, *arguments)
        yield
        stack.pop_all()
