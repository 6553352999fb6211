"""What the launchers of acceptance record."""

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.ops.acceptance.cuda import enter_drafts, judge_drafts, settle_block
from tests.ops.recorded import functions, launches, limits_exceeded, meta, numbers

F32 = torch.float32
I64 = torch.int64
ONE = meta(1, dtype=I64)
SETTINGS = meta(4, dtype=F32)
NAN = meta(1, dtype=torch.int32)
RING = meta(3, 32, dtype=I64)
TOKEN = meta(dtype=I64)


def record(count: int, vocabulary: int) -> list[Launch]:
    logits = (meta(rows, vocabulary, dtype=F32) for rows in (count + 1, count))
    read = (meta(count, dtype=I64), SETTINGS, ONE, ONE)
    return launches(judge_drafts, *logits, *read, tokens=count + 1)


def settled(judged: tuple[Tensor, Tensor] | None) -> list[Launch]:
    return launches(settle_block, judged, TOKEN, (ONE, ONE), ONE, RING, NAN, tokens=1)


@pytest.mark.parametrize("count", [1, 5, 7])
@pytest.mark.parametrize(
    ("vocabulary", "values"), [(89, 4), (32_769, 8), (129_280, 16), (131_072, 16)]
)
def test_a_cluster_judges_each_draft(count: int, vocabulary: int, values: int) -> None:
    (launch,) = record(count, vocabulary)
    shape = launch.shape
    assert (shape.grid, shape.threads, shape.cluster) == ((8 * count, 1, 1), 1024, 8)
    assert shape.shared_bytes == 3 * 4 * values * 1024
    assert dict(shape.kernel.defines)["VECTOR"] == int(vocabulary % 4 == 0)
    assert limits_exceeded(shape) == []
    assert numbers(launch) == {"vocabulary": vocabulary, "count": count}


def test_other_drafts_and_logits_are_refused() -> None:
    for count in (0, 8):
        with pytest.raises(ValueError, match=r"drafts_N: found .*, expected .N. with N from 1 to"):
            record(count, 89)
    with pytest.raises(ValueError, match=r"logits_MV: found .M, 131073., expected"):
        record(2, 131_073)
    rows = meta(3, 89, dtype=F32)
    with pytest.raises(ValueError, match=r"draft_logits_NV: found .* \[3, 89\], expected"):
        launches(judge_drafts, rows, rows, meta(2, dtype=I64), SETTINGS, ONE, ONE, tokens=3)


def test_one_warp_settles_a_block_with_drafts_and_without() -> None:
    (launch,) = settled((meta(5, dtype=I64), meta(5, dtype=I64)))
    assert (launch.shape.grid, launch.shape.threads) == ((1, 1, 1), 32)
    assert numbers(launch) == {"count": 5, "slots": 32}
    (launch,) = settled(None)
    assert numbers(launch) == {"count": 0, "slots": 32}
    assert launch.arguments["replacements"] is None
    with pytest.raises(ValueError, match=r"replacements_N: found .* \[4\], expected"):
        settled((meta(4, dtype=I64), meta(5, dtype=I64)))


def test_drafts_enter_by_one_launch() -> None:
    three = meta(3, dtype=I64)
    assert functions(launches(enter_drafts, three, three, tokens=1)) == ["enter_drafts"]
    with pytest.raises(ValueError, match=r"tokens_N: found .* \[1\], expected"):
        launches(enter_drafts, three, ONE, tokens=1)
