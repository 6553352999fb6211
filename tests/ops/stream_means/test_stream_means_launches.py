"""What the launcher of stream means records."""

import pytest
import torch

from dsv4.ops.stream_means.cuda import stream_means
from tests.ops.recorded import assert_serves_shorter_chunks, functions, launches, meta, numbers


def test_a_launch_for_every_tap() -> None:
    found = launches(stream_means, [meta(6, 4, 4096)] * 3, tokens=6)
    assert functions(found) == ["stream_means"] * 3
    assert found[1].shape.grid == (16, 6, 1)
    assert numbers(found[2]) == {"streams": 4, "width": 4096, "row": 12288}


def test_it_serves_shorter_chunks() -> None:
    assert_serves_shorter_chunks(
        lambda tokens: launches(stream_means, [meta(tokens, 4, 256)] * 2, tokens=tokens), 139
    )


def test_other_streams_are_refused() -> None:
    with pytest.raises(ValueError, match=r"taps: found torch\.float32"):
        launches(stream_means, [meta(2, 4, 8, dtype=torch.float32)], tokens=2)
