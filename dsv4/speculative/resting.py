"""Decoding while drafts do not pay: steps of the main model alone, until they are tried again."""

import time
from collections.abc import Callable, Generator
from contextlib import closing

from dsv4.caches.draft import DraftState
from dsv4.speculative.block_loop import Drafting

# The ``steps`` tokens that follow a token.
Follow = Callable[[int, int], Generator[int, None, None]]


def with_rests(
    token: int, steps: int, drafting: Drafting, state: DraftState, drafted: Follow, alone: Follow
) -> Generator[int, None, None]:
    """Yields the ``steps`` tokens that follow ``token``: of ``drafted``, which ends where drafts
    are to rest, and meanwhile of ``alone``, steps of one token that write none of the module's
    rows. So the rests end as many steps before drafts are tried again as the module's window has.
    """
    given = 0
    while given < steps:
        rest = min(drafting.count.rest(state.stages[0].window), steps - given)
        following = alone(token, rest) if rest else drafted(token, steps - given)
        with closing(following) as tokens:
            try:
                began = time.perf_counter()
                for token in tokens:
                    given += 1
                    if rest:
                        now = time.perf_counter()
                        drafting.tally.add(0, 0, 1, (0.0, now - began))
                        drafting.count.skip()
                        began = now
                    yield token
            finally:
                if rest:
                    state.forget()
