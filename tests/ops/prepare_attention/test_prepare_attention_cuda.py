"""prepare_attention on the GPU: one launch against the torch op at every phase of a window, in
graphs and guards.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from dsv4.caches.rows import RowCache
from dsv4.launch.recording import Recording
from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.indexer.query import index_query
from dsv4.ops.prepare_attention import Compression, Queries, QueryKeyNorm, decode, prefill
from dsv4.ops.prepare_attention import prepare_attention as torch_prepare_attention
from tests.ops import forms
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, guarded, poison
from tests.ops.prepare_attention.cases import JUNK, RATIOS, Step, junk_rows, step

pytestmark = pytest.mark.gpu

RECORDED = forms.by_tokens(decode.prepare_attention, prefill.prepare_attention)
prepare_attention = immediately(RECORDED)
HEADS = {"Flash": 64, "Pro": 128}
INDEX_HEADS = 64
# Every phase of a window of 4, the ends of windows of 128, long contexts.
EDGES = (0, 1, 2, 3, 4, 5, 120, 121, 125, 126, 127, 128, 129, 255, 256, 1_048_560, 1_048_571)


@pytest.fixture(autouse=True)
def on_cuda():
    with torch.device("cuda"):
        yield


def assert_close_rows(found: RowCache, expected: RowCache, what: str) -> None:
    """Rows that the torch op wrote hold nearly its values, all others their junk."""
    one = found.data.view(torch.uint8)
    two = expected.data.view(torch.uint8)
    written = (two != JUNK).any(1)
    assert bool((one[~written] == JUNK).all()), f"{what}: a row was written that should not be"
    if not bool(written.any()):
        return
    slots = written.nonzero().flatten()
    values = found.read(slots)
    right = expected.read(slots)
    error = (values - right).abs() - 0.14 * right.abs() - 2**-6 * right.abs().amax(1, keepdim=True)
    assert float(error.max()) <= 0, what
    assert float((one[written] != two[written]).float().mean()) < 0.04, what


def assert_close_queries(found: Tensor, expected: Tensor, what: str) -> None:
    """Equal but for a few roundings that the order of a sum decides."""
    difference = (found.float() - expected.float()).abs()
    assert float(difference.max()) <= 2**-7 * float(expected.float().abs().max()), what
    assert float((difference > 0).float().mean()) < 0.01, what


@pytest.mark.parametrize("kind", RATIOS)
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("tokens", range(1, 10))
def test_equals_the_torch_op_at_every_boundary(kind: str, quantised: bool, tokens: int) -> None:
    for start in EDGES:
        found = step(kind, start, tokens, HEADS["Flash"], INDEX_HEADS, quantised)
        expected = found.twin()
        poison(1 << 20)
        queries = prepare_attention(*found.arguments())
        right = torch_prepare_attention(*expected.arguments())
        assert_close_queries(queries.q_THD, right.q_THD, f"queries at {start}")
        if right.index_TID is not None:
            assert queries.index_TID is not None
            assert_close_queries(queries.index_TID, right.index_TID, f"index queries at {start}")
        assert_close_rows(found.ring, expected.ring, f"window keys at {start}")
        for index, (one, two) in enumerate(
            zip(found.compressions, expected.compressions, strict=True)
        ):
            assert_close_rows(one.state.rows, two.state.rows, f"compressor {index} at {start}")
            assert torch.equal(one.state.ring.kv, two.state.ring.kv)
            assert torch.equal(one.state.ring.score, two.state.ring.score)


@pytest.mark.parametrize("kind", RATIOS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("tokens", range(1, 9))
def test_one_launch_gives_the_bits_of_the_separate_ones(kind: str, heads: int, tokens: int) -> None:
    for start in EDGES:
        found = step(kind, start, tokens, heads, INDEX_HEADS)
        expected = found.twin()
        poison(1 << 20)
        op = PreparedOp(RECORDED, *found.arguments())
        assert len(op.program.recording.items) == 1
        queries = op.run()
        right = immediately(in_parts)(*expected.arguments())
        assert_same_bytes(
            [*tensors(queries), *found.caches()],
            [*tensors(right), *expected.caches()],
            f"at {start}",
        )


@pytest.mark.parametrize("kind", RATIOS)
def test_any_steps_give_the_same_rows(kind: str) -> None:
    """A sequence in steps of 1 to 8 tokens ends with the caches that one long step leaves."""
    starts = [0, *accumulate(1 + index % 8 for index in range(31))]
    whole = step(kind, 0, starts[-1], HEADS["Flash"], INDEX_HEADS)
    expected = whole.twin()
    prepare_attention(*expected.arguments())
    for start, stop in pairwise(starts):
        prepare_attention(*part_of(whole, start, stop).arguments())
    for one, two in zip(whole.compressions, expected.compressions, strict=True):
        assert torch.equal(
            one.state.rows.data.view(torch.uint8), two.state.rows.data.view(torch.uint8)
        )
        assert torch.equal(one.state.ring.score, two.state.ring.score)


@pytest.mark.parametrize("kind", RATIOS)
@pytest.mark.parametrize(("start", "tokens"), [(126, 1), (127, 1), (120, 8), (3, 4)])
def test_replay_guards_and_no_synchronisation(kind: str, start: int, tokens: int) -> None:
    case, checks = in_guards(step(kind, start, tokens, HEADS["Flash"], INDEX_HEADS))
    op = PreparedOp(RECORDED, *case.arguments())

    def call() -> list[Tensor]:
        return tensors(op.run())

    assert_replay_is_eager(call, case.caches())
    assert_no_synchronisation(call)
    for check in checks:
        check()


def test_junk_of_an_earlier_sequence_is_never_seen() -> None:
    clean = step("csa", 0, 4, HEADS["Flash"], INDEX_HEADS)
    dirty = clean.twin()
    for compression in dirty.compressions:
        compression.state.ring.kv.fill_(torch.nan)
        compression.state.ring.score.fill_(torch.nan)
    for case in (clean, dirty):
        prepare_attention(*case.arguments())
    for one, two in zip(clean.compressions, dirty.compressions, strict=True):
        assert torch.equal(
            one.state.rows.data.view(torch.uint8), two.state.rows.data.view(torch.uint8)
        )


def test_what_goes_in_parts() -> None:
    """Another table of frequencies, and compressors' products that are columns of wider tensors."""
    case = step("csa", 3, 2, HEADS["Flash"], INDEX_HEADS)
    own_table = replace(case.twin(), norm=replace(case.norm, inv_freq=case.norm.inv_freq.clone()))
    strided = case.twin()
    strided = replace(strided, compressions=tuple(map(in_wider_tensors, strided.compressions)))
    right = [*tensors(prepare_attention(*case.arguments())), *case.caches()]
    for what, other in (("a table of its own", own_table), ("strided", strided)):
        op = PreparedOp(RECORDED, *other.arguments())
        assert len(op.program.recording.items) > 1
        assert_same_bytes([*tensors(op.run()), *other.caches()], right, what)


@pytest.mark.parametrize("kind", RATIOS)
@pytest.mark.parametrize("tokens", [9, 130, 299])
def test_a_recording_serves_shorter_chunks_with_the_same_bytes(kind: str, tokens: int) -> None:
    found = step(kind, 100, 300, HEADS["Flash"], INDEX_HEADS)
    found = replace(found, ring=junk_rows(443, 512, found.ring.format, torch.bfloat16))
    expected = found.twin()
    queries = PreparedOp(RECORDED, *found.arguments()).run(tokens)
    right = prepare_attention(*part_of(expected, 0, tokens).arguments())
    one = [tensor[:tokens] for tensor in tensors(queries)]
    assert_same_bytes([*one, *found.caches()], [*tensors(right), *expected.caches()], kind)


def test_wrong_arguments() -> None:
    case = step("csa", 3, 2)
    queries = Queries(case.queries.q_THD.float(), case.queries.index_TID)
    with pytest.raises(ValueError, match=r"q_THD: found torch\.float32"):
        prepare_attention(*replace(case, queries=queries).arguments())
    with pytest.raises(ValueError, match="kv_TD: found"):
        prepare_attention(*replace(case, kv_TD=case.kv_TD.float()).arguments())
    with pytest.raises(ValueError, match="positions_T: found"):
        prepare_attention(*replace(case, positions_T=case.positions_T[:1]).arguments())
    wrong = replace(case.compressions[0], score_TW=case.compressions[0].score_TW[:1])
    with pytest.raises(ValueError, match="score_TW: found"):
        prepare_attention(*replace(case, compressions=(wrong, case.compressions[1])).arguments())


def tensors(queries: Queries) -> list[Tensor]:
    return [tensor for tensor in queries if tensor is not None]


def assert_same_bytes(found: list[Tensor], expected: list[Tensor], what: str) -> None:
    for index, (one, two) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), f"tensor {index} {what}"


def in_parts(
    recording: Recording,
    queries: Queries,
    kv_TD: Tensor,
    positions_T: Tensor,
    norm: QueryKeyNorm,
    ring: RowCache,
    compressions: tuple[Compression, ...],
) -> Queries:
    """The launches that the one launch stands for."""
    q_THD = forms.query_rope(recording, queries.q_THD, positions_T, norm.inv_freq, norm.eps)
    forms.kv_write(recording, kv_TD, norm.kv_norm, positions_T, norm.inv_freq, ring, norm.eps)
    for part in compressions:
        products = part.kv_TW, part.score_TW
        forms.compress(recording, *products, positions_T, part.weights, part.state)
    if queries.index_TID is None:
        return Queries(q_THD, None)
    return Queries(q_THD, index_query(recording, queries.index_TID, positions_T, norm.inv_freq))


def in_wider_tensors(part: Compression) -> Compression:
    """The same products, the score right of kv."""
    both = torch.cat((part.kv_TW, part.score_TW), dim=1)
    columns = part.kv_TW.shape[1]
    return replace(part, kv_TW=both[:, :columns], score_TW=both[:, columns:])


def part_of(whole: Step, start: int, stop: int) -> Step:
    """Tokens [start, stop) of a step, with the same caches."""
    tokens = slice(start, stop)
    (q_THD, index_TID) = whole.queries
    queries = Queries(q_THD[tokens], None if index_TID is None else index_TID[tokens])
    compressions = tuple(
        replace(one, kv_TW=one.kv_TW[tokens], score_TW=one.score_TW[tokens])
        for one in whole.compressions
    )
    kv_TD = whole.kv_TD[tokens]
    positions_T = whole.positions_T[tokens]
    return replace(
        whole, queries=queries, kv_TD=kv_TD, positions_T=positions_T, compressions=compressions
    )


def in_guards(case: Step) -> tuple[Step, list[Callable[[], None]]]:
    """The same step with guard bands around everything that it writes into."""
    checks: list[Callable[[], None]] = []

    def keep(tensor: Tensor) -> Tensor:
        copy, check = guarded(tensor)
        checks.append(check)
        return copy

    def keep_rows(rows: RowCache) -> RowCache:
        return replace(
            rows,
            data=keep(rows.data),
            block_scale=None if rows.block_scale is None else keep(rows.block_scale),
        )

    compressions = []
    for one in case.compressions:
        ring = replace(one.state.ring, kv=keep(one.state.ring.kv), score=keep(one.state.ring.score))
        compressions.append(
            replace(one, state=replace(one.state, ring=ring, rows=keep_rows(one.state.rows)))
        )
    return replace(case, ring=keep_rows(case.ring), compressions=tuple(compressions)), checks
