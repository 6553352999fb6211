"""Which steps of captured graphs a profile looks at."""

import pytest

from dsv4.measure.graph_profile import place_of_tokens


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((1024, 4096, 2051), (1024, 17)),
        ((2045, 4096, 2051), (2034, 17)),
        ((2051, 4096, 2051), (2051, 17)),
        ((4096, 4096, 2051), (4079, 17)),
        ((2052, 2054, 2051), (2051, 3)),
        # Behind the last dense step there is no room for two tokens.
        ((2052, 2052, 2051), (2034, 17)),
        ((2051, 2051, 2051), (2034, 17)),
        ((300, 300, 2051), (283, 17)),
        ((0, 2, 2051), (0, 2)),
        ((9, 12, 7), (7, 5)),
        ((5, 12, 7), (0, 7)),
        ((5, 12, 0), (0, 12)),
    ],
)
def test_profiled_steps_are_all_dense_or_none(
    place: tuple[int, int, int], expected: tuple[int, int]
) -> None:
    found = place_of_tokens(*place)
    assert found == expected
    position, tokens = found
    _, max_context, dense_until = place
    assert position + tokens <= max_context
    assert position >= dense_until or position + tokens <= dense_until
