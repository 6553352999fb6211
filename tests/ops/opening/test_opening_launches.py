"""What the launchers of a step's opening record."""

import pytest
import torch

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.opening.cuda import embed, next_positions
from tests.ops.recorded import (
    HOPPER,
    TARGETS,
    assert_serves_shorter_chunks,
    functions,
    launches,
    meta,
)

ONE = meta(1, dtype=torch.int64)
WIDTHS = {7168: "embed", 4096: "embed", 8: "embed", 7: "embed_any_geometry"}


def embedded(tokens: int, width: int, target: Target = HOPPER) -> list[Launch]:
    arguments = meta(tokens, dtype=torch.int64), ONE, ONE, meta(50, width), 4, torch.bfloat16
    return launches(embed, *arguments, tokens=tokens, target=target)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("width", WIDTHS)
def test_one_launch_embeds_and_places_the_tokens(width: int, target: Target) -> None:
    for tokens in (*range(1, 9), 9, 700):
        assert functions(embedded(tokens, width, target)) == [WIDTHS[width]]
    assert embedded(5, 7168)[0].shape.grid == (5, 7, 1)
    for most in (512, 2048):
        assert_serves_shorter_chunks(lambda tokens: embedded(tokens, width, target), most)


def test_other_devices_place_the_tokens_alone() -> None:
    def record(tokens: int) -> list[Launch]:
        return launches(next_positions, ONE, ONE, tokens, tokens=tokens)

    for tokens in range(1, 9):
        assert functions(record(tokens)) == ["next_positions"]
        assert record(tokens)[0].shape.numbers == {"tokens": tokens}
    for most in (512, 2048):
        assert_serves_shorter_chunks(record, most)
    with pytest.raises(ValueError, match="tokens: found 3, expected 2 of the recording"):
        next_positions(Recording(HOPPER, 2), ONE, ONE, 3)


def test_a_misaligned_table_is_read_value_by_value() -> None:
    table_VE = meta(50 * 8 + 3)[3:].view(50, 8)
    tokens_T = meta(2, dtype=torch.int64)
    found = launches(embed, tokens_T, ONE, ONE, table_VE, 4, torch.bfloat16, tokens=2)
    assert functions(found) == ["embed_any_geometry"]


def test_other_dtypes_are_refused() -> None:
    tokens_T = meta(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"dtype: found torch.float32, expected torch.bfloat16"):
        launches(embed, tokens_T, ONE, ONE, meta(4, 8), 4, torch.float32, tokens=2)
    table_VE = meta(4, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"table_VE: found torch.float32 .*, expected torch.bf"):
        launches(embed, tokens_T, ONE, ONE, table_VE, 4, torch.bfloat16, tokens=2)
    with pytest.raises(ValueError, match=r"rejected_1: found torch.int32 \[1\], expected"):
        launches(next_positions, ONE, ONE.int(), 2, tokens=2)
