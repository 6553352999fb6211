"""Prefill attention on the GPU over real shapes: both cache formats, every kind of layer, the edges
of the window.
"""

from dataclasses import replace

import pytest
import torch

from dsv4.caches.rows import RowFormat
from dsv4.ops.attention.prefill import sparse_attention
from dsv4.ops.immediate import PreparedOp, immediately
from tests.ops.attention.prefill_cases import LAUNCHERS, Case, Rows, check, make_case
from tests.ops.gpu import (
    assert_no_synchronisation,
    assert_replay_is_eager,
    guarded,
    poison,
)

pytestmark = pytest.mark.gpu

STARTS = [0, 3, 4, 119, 126, 127, 128, 129, 511, 513, 5000, 65_531]


@pytest.mark.parametrize("kernel", LAUNCHERS)
@pytest.mark.parametrize(
    "format", [RowFormat.KV_FP8, RowFormat.PLAIN], ids=lambda format: format.value
)
@pytest.mark.parametrize(
    ("heads", "listed"),
    [(64, 512), (128, 1024), (32, 512), (16, 1024), (8, 512)],
    ids=["flash", "pro", "flash of 2", "pro of 8", "flash of 8"],
)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_real_shapes(heads: int, listed: int, ratio: int, format: RowFormat, kernel: str) -> None:
    check(make_case(200, heads, ratio, listed if ratio == 4 else 0, 3001, Rows(format)), kernel)


@pytest.mark.parametrize("kernel", LAUNCHERS)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("heads", [64, 32, 16])
def test_boundaries(heads: int, ratio: int, start: int, kernel: str) -> None:
    check(make_case(17, heads, ratio, 512 if ratio == 4 else 0, start), kernel)


@pytest.mark.parametrize("tokens", [9, 63, 65, 131])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_numbers_of_tokens(ratio: int, tokens: int) -> None:
    check(make_case(tokens, 64, ratio, 512 if ratio == 4 else 0, 1000))


@pytest.mark.parametrize("heads", [1, 4, 15, 17, 20, 31, 33, 60, 68, 132])
@pytest.mark.parametrize("ratio", [4, 128])
def test_numbers_of_heads(ratio: int, heads: int) -> None:
    check(make_case(21, heads, ratio, 64 if ratio == 4 else 0, 777))


@pytest.mark.parametrize("kernel", LAUNCHERS)
@pytest.mark.parametrize("listed", [1, 2, 7, 63, 64, 65, 255, 257, 1000, 2048])
@pytest.mark.parametrize("heads", [64, 32])
def test_lengths_of_the_list(heads: int, listed: int, kernel: str) -> None:
    check(make_case(11, heads, 4, listed, 2500), kernel)


@pytest.mark.parametrize("kernel", LAUNCHERS)
@pytest.mark.parametrize("heads", [64, 32, 16])
def test_tiles_without_an_entry(heads: int, kernel: str) -> None:
    """Lists whose only entries stand at the start, in the middle, at the end, or nowhere; several
    units per block.
    """
    case = make_case(700, heads, 4, 1024, 3000)
    assert case.selected_TK is not None
    place = torch.arange(1024, device="cuda")
    kept = [place < 5, (place > 500) & (place < 503), place == 1023, place < 0]
    keep_TK = torch.stack(kept)[torch.arange(700, device="cuda") % 4]
    case.selected_TK.masked_fill_(~keep_TK, -1)
    check(case, kernel)


@pytest.mark.parametrize(("width", "rope_width"), [(64, 16), (64, 32), (128, 64), (256, 64)])
@pytest.mark.parametrize(
    "format", [RowFormat.KV_FP8, RowFormat.PLAIN], ids=lambda format: format.value
)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_other_head_sizes(width: int, rope_width: int, ratio: int, format: RowFormat) -> None:
    check(make_case(40, 8, ratio, 16 if ratio == 4 else 0, 300, Rows(format, width, rope_width)))


@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 100, 200])
def test_other_windows(window: int) -> None:
    check(make_case(30, 16, 128, 0, 250, Rows(window=window)))


@pytest.mark.parametrize("spare_slots", [8, 1000, 60_000])
def test_ring_sizes(spare_slots: int) -> None:
    check(make_case(100, 64, 4, 512, 5000, Rows(spare_slots=spare_slots)))


@pytest.mark.parametrize("kernel", LAUNCHERS)
@pytest.mark.parametrize("heads", [128, 16])
def test_thousands_of_complete_entries(heads: int, kernel: str) -> None:
    check(make_case(20, heads, 128, 0, 1_000_000), kernel)


@pytest.mark.parametrize("kernel", LAUNCHERS)
@pytest.mark.parametrize(("tokens", "heads"), [(600, 128), (900, 32), (900, 8)])
def test_several_waves_of_blocks(tokens: int, heads: int, kernel: str) -> None:
    check(make_case(tokens, heads, 4, 1024, 0), kernel)


@pytest.mark.parametrize("kernel", LAUNCHERS)
@pytest.mark.parametrize("heads", [64, 32, 16])
def test_large_logits_and_sinks(heads: int, kernel: str) -> None:
    case = make_case(30, heads, 4, 64, 500)
    case.q_THD.mul_(1000.0)
    case.sink_H[::2] = 200.0
    case.sink_H[1::4] = -1e9
    check(case, kernel)


@pytest.mark.parametrize("heads", [64, 32, 16])
def test_rows_alone_give_the_same_bits(heads: int) -> None:
    case = make_case(300, heads, 4, 512, 400)
    whole = immediately(sparse_attention)(*case.arguments())
    part = slice(100, 150)
    assert case.selected_TK is not None
    alone = replace(
        case,
        q_THD=case.q_THD[part],
        selected_TK=case.selected_TK[part],
        positions_T=case.positions_T[part],
    )
    assert torch.equal(immediately(sparse_attention)(*alone.arguments()), whole[part])


@pytest.mark.parametrize("kernel", LAUNCHERS)
def test_a_recording_serves_shorter_chunks_with_the_same_bits(kernel: str) -> None:
    """Of 300 tokens, run for the first 9, 64 and 150, whose last position is that of the chunk."""
    case = make_case(300, 64, 4, 512, 400)
    op = PreparedOp(LAUNCHERS[kernel], *case.arguments())
    for tokens in (9, 64, 150, 300):
        poison(1 << 20)
        assert case.selected_TK is not None
        part = replace(
            case,
            q_THD=case.q_THD[:tokens],
            selected_TK=case.selected_TK[:tokens],
            positions_T=case.positions_T[:tokens],
        )
        alone = immediately(LAUNCHERS[kernel])(*part.arguments())
        assert torch.equal(op.run(tokens)[:tokens], alone)


@pytest.mark.parametrize("kernel", LAUNCHERS)
@pytest.mark.parametrize("heads", [64, 32, 16])
def test_same_bits_again_and_unchanged_caches(heads: int, kernel: str) -> None:
    case = make_case(500, heads, 4, 512, 400)
    assert case.keys.compressed is not None
    before = case.keys.ring.data.clone(), case.keys.compressed.data.clone()
    attend = immediately(LAUNCHERS[kernel])
    first = attend(*case.arguments())
    for _ in range(3):
        assert torch.equal(attend(*case.arguments()), first)
    assert torch.equal(case.keys.ring.data, before[0])
    assert torch.equal(case.keys.compressed.data, before[1])


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_replay_and_no_synchronisation(ratio: int) -> None:
    case = make_case(70, 64, ratio, 512 if ratio == 4 else 0, 2000)
    op = PreparedOp(sparse_attention, *case.arguments())
    assert_replay_is_eager(op.run)
    assert_no_synchronisation(op.run)


def test_replay_reads_positions_from_the_device() -> None:
    case = make_case(40, 64, 128, 0, 2000)
    later = make_case(40, 64, 128, 0, 2600)
    call = Case(case.q_THD, later.keys, None, case.sink_H, later.positions_T.clone(), case.inv_freq)
    op = PreparedOp(sparse_attention, *call.arguments())
    op.run()
    call.positions_T.copy_(case.positions_T + 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.run()
    call.positions_T.copy_(later.positions_T)
    graph.replay()
    assert torch.equal(captured, immediately(sparse_attention)(*call.arguments()))


def test_writes_nothing_outside_and_reads_nothing_strange() -> None:
    case = make_case(33, 20, 4, 100, 900)
    guards = [guarded(tensor) for tensor in (case.q_THD, case.sink_H, case.positions_T)]
    q_THD, sink_H, positions_T = (copy for copy, _ in guards)
    attend = immediately(sparse_attention)
    out = attend(q_THD, case.keys, case.selected_TK, sink_H, positions_T, case.inv_freq)
    assert torch.equal(out, attend(*case.arguments()))
    for _, verify in guards:
        verify()


def test_wrong_arguments_are_named() -> None:
    case = make_case(9, 64, 4, 64, 100)
    q_THD, keys, selected_TK, sink_H, positions_T, frequencies = case.arguments()
    assert selected_TK is not None
    wrong = {
        "q_THD": (q_THD.float(), keys, selected_TK, sink_H, positions_T, frequencies),
        "selected_TK": (q_THD, keys, selected_TK.int(), sink_H, positions_T, frequencies),
        "sink_H": (q_THD, keys, selected_TK, sink_H.bfloat16(), positions_T, frequencies),
        "positions_T": (q_THD, keys, selected_TK, sink_H, positions_T[:-1], frequencies),
        "inv_freq": (q_THD, keys, selected_TK, sink_H, positions_T, frequencies[::2]),
    }
    for name, arguments in wrong.items():
        with pytest.raises(ValueError, match=f"^{name}: found "):
            immediately(sparse_attention)(*arguments)
