"""CUDA indexer over the real shapes: rotated queries, and selections that must be exact."""

import pytest
import torch
from torch import Tensor

from dsv4.caches.rows import RowCache, RowFormat, pack_index_rows, unpack_index_rows
from dsv4.ops import indexer as reference
from dsv4.ops.immediate import PreparedOp, immediately
from dsv4.ops.indexer import decode, prefill, query
from tests.ops.cases import integers, inv_freq, normal
from tests.ops.forms import by_tokens
from tests.ops.gpu import assert_no_synchronisation, assert_replay_is_eager, poison

pytestmark = pytest.mark.gpu

HEADS = 64
WIDTH = 128
ROPE = 64
FP8 = RowFormat.INDEX_FP8
PLAIN = RowFormat.PLAIN


select = by_tokens(decode.index_select, prefill.index_select)
index_select = immediately(select)
index_query = immediately(query.index_query)


@pytest.fixture(autouse=True)
def on_cuda():
    with torch.device("cuda"):
        yield


def cache(slots: int, format: RowFormat, width: int = WIDTH) -> RowCache:
    device = torch.device("cuda", torch.cuda.current_device())
    return RowCache.allocate(slots, width, min(ROPE, width), format, torch.bfloat16, device)


def exact_case(
    slots: int, tokens: int, format: RowFormat, heads: int = HEADS, spread: int = 2, seed: int = 1
) -> tuple[Tensor, Tensor, RowCache]:
    """Queries, weights and keys of whole numbers: scores are exact in float32, with very many ties.

    Every query has a 448, which meets zeros, so that its fp8 scale is 1; fp8 keys are written with
    scale 1.
    """
    q_TID = integers(-spread, spread, tokens, heads, WIDTH, seed=seed)
    q_TID[..., 0] = 448
    rows_SD = integers(-spread, spread, slots, WIDTH, seed=seed + 1)
    rows_SD[:, 0] = 0
    keys = cache(slots, format)
    if format is FP8:
        keys.data.copy_(rows_SD.to(torch.float8_e4m3fn).view(torch.uint8))
        assert keys.block_scale is not None
        keys.block_scale.fill_(1)
    else:
        keys.data.copy_(rows_SD)
    return q_TID.bfloat16(), integers(-3, 3, tokens, heads, seed=seed + 2), keys


def ascending(selected_TK: Tensor) -> Tensor:
    """In ascending order, then -1."""
    high = torch.where(selected_TK < 0, 1 << 40, selected_TK).sort(dim=1).values
    return torch.where(high == 1 << 40, -1, high)


def assert_selects_like_torch(
    q_TID: Tensor,
    weight_TI: Tensor,
    keys: RowCache,
    position_T: Tensor,
    topk: int,
    score_scale: float = 0.5,
) -> None:
    poison(16 << 20)
    found_TK = index_select(q_TID, weight_TI, score_scale, keys, position_T, topk)
    expected_TK = ascending(
        reference.index_select(q_TID, weight_TI, score_scale, keys, position_T, topk)
    )
    assert found_TK.dtype == torch.int64
    assert found_TK.shape == expected_TK.shape
    wrong = (found_TK != expected_TK).any(1).nonzero().flatten().tolist()
    if wrong:
        t = wrong[0]
        found = set(found_TK[t].tolist())
        expected = set(expected_TK[t].tolist())
        pytest.fail(
            f"tokens {wrong[:8]} of {len(found_TK)} differ; token {t} at {int(position_T[t])}: "
            f"{len(found)} distinct, missing {sorted(expected - found)[:8]}, "
            f"extra {sorted(found - expected)[:8]}, "
            f"ascending {bool((found_TK[t].diff() > 0).all())}, first {found_TK[t][:8].tolist()}"
        )


@pytest.mark.parametrize("format", [FP8, PLAIN], ids=lambda format: format.value)
@pytest.mark.parametrize(
    "position", [0, 2, 3, 4, 7, 8, 63, 67, 127, 128, 129, 511, 512, 515, 2047, 2050, 2051, 2055]
)
def test_one_token_at_the_boundaries(format: RowFormat, position: int) -> None:
    case = exact_case(600, 1, format)
    for topk in (1, 16, 512, 1024):
        assert_selects_like_torch(*case, torch.tensor([position]), topk)


@pytest.mark.parametrize("format", [FP8, PLAIN], ids=lambda format: format.value)
@pytest.mark.parametrize("slots", [4097, 16384, 16385, 16500, 65537, 262145])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_long_contexts(format: RowFormat, slots: int, tokens: int) -> None:
    case = exact_case(slots, tokens, format, seed=slots + tokens)
    for topk in (512, 1024):
        for last in (4 * slots - 1, 4 * slots - 5, 2 * slots + 1, 4 * topk + 7):
            assert_selects_like_torch(*case, torch.arange(last - tokens + 1, last + 1), topk)


@pytest.mark.parametrize("slots", [9000, 40000, 262145])
@pytest.mark.parametrize("topk", [1, 16, 2048, 5000])
def test_other_list_lengths(slots: int, topk: int) -> None:
    assert_selects_like_torch(*exact_case(slots, 1, FP8), torch.tensor([4 * slots - 1]), topk)


@pytest.mark.parametrize("slots", [12000, 262145])
@pytest.mark.parametrize("kind", ["equal", "rising", "falling", "cluster", "few"])
def test_extreme_distributions(slots: int, kind: str) -> None:
    """One query picks column 1: scores are what the keys hold there.

    'equal': only ties, 'cluster': the best lie together, 'few': two values.
    """
    entry = torch.arange(slots)
    value = {
        "equal": torch.ones(slots),
        "rising": (entry // (slots // 100)).float(),
        "falling": ((slots - entry) // (slots // 100)).float(),
        "cluster": ((entry > slots // 2) & (entry < slots // 2 + 3000)).float() * (1 + entry % 50),
        "few": (entry % 7 == 3).float(),
    }[kind]
    keys = cache(slots, PLAIN)
    keys.data[:, 1] = value
    q_TID = torch.zeros(1, HEADS, WIDTH, dtype=torch.bfloat16)
    q_TID[0, 5, 1] = 1
    for topk in (512, 1024):
        assert_selects_like_torch(
            q_TID, torch.ones(1, HEADS), keys, torch.tensor([4 * slots - 1]), topk
        )


@pytest.mark.parametrize("format", [FP8, PLAIN], ids=lambda format: format.value)
@pytest.mark.parametrize(
    ("start", "tokens", "slots"),
    [(0, 9, 40), (3000, 200, 1000), (0, 4500, 1200), (400, 300, 262145)],
)
def test_prefill(format: RowFormat, start: int, tokens: int, slots: int) -> None:
    case = exact_case(slots, tokens, format, seed=tokens)
    for topk in (16, 512):
        assert_selects_like_torch(*case, torch.arange(start, start + tokens), topk)


@pytest.mark.parametrize("slots", [30000, 262145])
def test_prefill_at_long_context(slots: int) -> None:
    """More scores than one tile of the workspace holds at 262145 slots."""
    tokens = 300
    case = exact_case(slots, tokens, FP8, heads=8, seed=tokens)
    assert_selects_like_torch(*case, torch.arange(4 * slots - tokens, 4 * slots), 512)


@pytest.mark.parametrize("heads", [1, 4, 8, 24, 32, 64, 72])
@pytest.mark.parametrize("format", [FP8, PLAIN], ids=lambda format: format.value)
def test_other_numbers_of_heads(heads: int, format: RowFormat) -> None:
    for tokens in (1, 20):
        case = exact_case(700, tokens, format, heads=heads)
        assert_selects_like_torch(*case, torch.arange(2700 - tokens, 2700), 64)


def real_case(
    slots: int, tokens: int, format: RowFormat, width: int = WIDTH
) -> tuple[Tensor, Tensor, RowCache]:
    keys = cache(slots, format, width)
    for part in torch.arange(slots).split(65536):
        keys.write(part, normal(len(part), width, seed=int(part[0])))
    return (
        normal(tokens, HEADS, width, seed=20, dtype=torch.bfloat16),
        normal(tokens, HEADS, seed=21),
        keys,
    )


@pytest.mark.parametrize("format", [FP8, PLAIN], ids=lambda format: format.value)
@pytest.mark.parametrize(
    ("slots", "tokens", "width"), [(3000, 1, 128), (3000, 30, 128), (262145, 2, 128), (900, 3, 32)]
)
def test_real_values(format: RowFormat, slots: int, tokens: int, width: int) -> None:
    """Up to float32 rounding of the scores nothing outside the selection is better."""
    q_TID, weight_TI, keys = real_case(slots, tokens, format, width)
    position_T = torch.arange(4 * slots - tokens - 1, 4 * slots - 1)
    selected_TK = index_select(q_TID, weight_TI, 0.01, keys, position_T, 512)
    # Rounded on the CPU: torch on CUDA multiplies by a reciprocal instead, so its scales are off.
    queries = (
        unpack_index_rows(*pack_index_rows(q_TID.cpu())).cuda() if format is FP8 else q_TID.float()
    )
    rows_SD = keys.read_all().double()
    for t in range(tokens):
        score_S = torch.relu(queries[t].double() @ rows_SD.T).T @ (weight_TI[t] * 0.01).double()
        score_S = score_S[: (int(position_T[t]) + 1) // 4]
        chosen = torch.zeros_like(score_S, dtype=torch.bool)
        chosen[selected_TK[t]] = True
        assert int(chosen.sum()) == 512
        assert bool((selected_TK[t].diff() > 0).all())
        gap = float(score_S[~chosen].max() - score_S[chosen].min())
        assert gap <= 4e-6 * float(score_S.abs().max()), f"token {t}: {gap}"


@pytest.mark.parametrize("topk", [512, 1024])
@pytest.mark.parametrize("slots", [1500, 4200, 9000, 16500, 33001, 70001, 262145])
def test_both_forms_select_the_same(slots: int, topk: int) -> None:
    """By a bound, and by a radix selection, from scores of the same bits."""
    q_TID, weight_TI, keys = real_case(slots, 9, FP8)
    position_T = torch.arange(4 * slots - 9, 4 * slots)
    many_TK = index_select(q_TID, weight_TI, 0.01, keys, position_T, topk)
    for tokens in (slice(0, 8), slice(8, 9)):
        few = q_TID[tokens], weight_TI[tokens], 0.01, keys, position_T[tokens], topk
        assert torch.equal(index_select(*few), many_TK[tokens])


def test_a_replay_follows_the_position() -> None:
    """Whatever it was in the replay before."""
    slots = 30000
    q_TID, weight_TI, keys = real_case(slots, 2, FP8)
    position_T = torch.tensor([0, 0])
    prepared = PreparedOp(select, q_TID, weight_TI, 0.01, keys, position_T, 512)
    graph = torch.cuda.CUDAGraph()
    prepared.run()
    with torch.cuda.graph(graph):
        prepared.run()
    for last in (100, 4 * slots - 1, 40000, 2040, 2100, 65536, 65600, 119000, 5):
        position_T.copy_(torch.tensor([last - 1, last]))
        poison(16 << 20)
        graph.replay()
        expected_TK = index_select(q_TID, weight_TI, 0.01, keys, position_T.clone(), 512)
        assert torch.equal(prepared.result, expected_TK), last


def test_nan_scores_come_first_and_unseen_rows_may_hold_anything() -> None:
    q_TID, weight_TI, keys = exact_case(3000, 2, FP8)
    keys.data[[17, 1500, 2400]] = 0x7F
    keys.data[2500:] = 0x7F
    position_T = torch.tensor([4 * 2500 - 1, 4 * 2500 - 2])
    assert_selects_like_torch(q_TID, weight_TI, keys, position_T, 512)
    found_TK = index_select(q_TID, weight_TI, 1.0, keys, position_T, 512)
    assert {17, 1500, 2400} <= set(found_TK[0].tolist())


@pytest.mark.parametrize(("slots", "tokens"), [(600, 1), (20000, 1), (262145, 4), (5000, 40)])
def test_replay_equals_the_eager_call(slots: int, tokens: int) -> None:
    q_TID, weight_TI, keys = real_case(slots, tokens, FP8)
    position_T = torch.arange(4 * slots - tokens, 4 * slots)

    prepared = PreparedOp(select, q_TID, weight_TI, 0.01, keys, position_T, 512)
    assert_replay_is_eager(prepared.run)
    assert_no_synchronisation(prepared.run)


@pytest.mark.parametrize("slots", [5000, 262145])
def test_a_recording_of_a_long_chunk_serves_shorter_ones(slots: int) -> None:
    """At 262145 slots tiles have 255 tokens; 259 tokens leave 4 for the second one."""
    most = 600
    q_TID, weight_TI, keys = exact_case(slots, most, FP8, heads=8, seed=slots)
    position_T = torch.arange(4 * slots - most, 4 * slots)
    prepared = PreparedOp(select, q_TID, weight_TI, 0.5, keys, position_T, 512)
    for tokens in (9, most, 259, 255, 100):
        found_TK = prepared.run(tokens)[:tokens]
        few = q_TID[:tokens], weight_TI[:tokens]
        expected_TK = reference.index_select(*few, 0.5, keys, position_T[:tokens], 512)
        assert torch.equal(found_TK, ascending(expected_TK)), tokens


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 300])
@pytest.mark.parametrize(
    ("heads", "width"), [(64, 128), (4, 128), (32, 32), (8, 64), (3, 256), (5, 16)]
)
def test_queries_are_rotated_twice(tokens: int, heads: int, width: int) -> None:
    frequencies = inv_freq(4)[: width // 4]
    for start in (0, 3, 70_000, 1_048_575 - tokens):
        position_T = torch.arange(start, start + tokens)
        q_TID = normal(tokens, heads, width, seed=start + 1, dtype=torch.bfloat16)
        found, expected = (
            op(q_TID, position_T, frequencies) for op in (index_query, reference.index_query)
        )
        different = float((found != expected).float().mean())
        error = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
        assert different < 0.01, f"at {start}: {different:.4f} of the values differ"
        assert error <= 2**-7, f"at {start}: {error}"
