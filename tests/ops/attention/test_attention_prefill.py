"""Prefill attention on the GPU over real shapes: both cache formats, every kind of layer, the edges
of the window.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.ops import TORCH
from dsv4.ops.attention.prefill import sparse_attention, sparse_attention_portable
from dsv4.ops.immediate import PreparedOp, immediately
from tests.ops.cases import WINDOW, inv_freq
from tests.ops.gpu import (
    assert_no_synchronisation,
    assert_replay_is_eager,
    guarded,
    poison,
    relative_error,
)

pytestmark = pytest.mark.gpu

# Norm of the error over the norm of the float32 result. Two roundings to bfloat16 (result,
# rotation) and the weights' give 2.5e-3 together.
BOUND = 5e-3
# That of the GPU, and the one that every GPU has.
LAUNCHERS = {"wgmma": sparse_attention, "mma": sparse_attention_portable}
STARTS = [0, 3, 4, 119, 126, 127, 128, 129, 511, 513, 5000, 65_531]


@dataclass(frozen=True)
class Case:
    """Arguments of one call."""

    q_THD: Tensor
    keys: KeySet
    selected_TK: Tensor | None
    sink_H: Tensor
    positions_T: Tensor
    inv_freq: Tensor

    def arguments(self) -> tuple[Tensor, KeySet, Tensor | None, Tensor, Tensor, Tensor]:
        return self.q_THD, self.keys, self.selected_TK, self.sink_H, self.positions_T, self.inv_freq

    def reference(self) -> Tensor:
        """float32, from the same bfloat16 queries."""
        return TORCH.sparse_attention(self.q_THD.float(), *self.arguments()[1:])


def unseen_are_nan(
    slots: int, seen: Tensor, width: int, rope_width: int, format: RowFormat
) -> RowCache:
    """Random rows in the slots ``seen``, bytes 0xFF (NaN in every format) in the others."""
    cache = RowCache.allocate(
        slots, width, rope_width, format, torch.bfloat16, torch.device("cuda")
    )
    cache.data.view(torch.uint8).fill_(0xFF)
    if cache.block_scale is not None:
        cache.block_scale.fill_(0xFF)
    # Group sizes of different magnitude, so that a wrong block scale shows.
    magnitude = torch.linspace(-2, 2, width, device="cuda").exp2()
    cache.write(seen, torch.randn(len(seen), width, device="cuda") * magnitude)
    return cache


def selection(positions_T: Tensor, ratio: int, listed: int) -> Tensor:
    """Distinct complete entries in random order; −1 at random places where there are fewer."""
    count = int(positions_T[-1] + 1) // ratio
    score = torch.rand(len(positions_T), max(count, listed), device="cuda")
    entry = torch.arange(score.shape[1], device="cuda")
    score[entry >= ((positions_T + 1) // ratio)[:, None]] = -1.0
    best, index = score.topk(listed, dim=1)
    index = torch.where(best < 0, -1, index)
    return torch.take_along_dim(
        index, torch.rand(index.shape, device="cuda").argsort(1), dim=1
    ).contiguous()


def make_case(
    tokens: int,
    heads: int,
    ratio: int,
    listed: int,
    start: int,
    format: RowFormat = RowFormat.KV_FP8,
    width: int = 512,
    rope_width: int = 64,
    window: int = WINDOW,
    spare_slots: int = 8,
) -> Case:
    torch.manual_seed(tokens * 7919 + heads * 31 + start)
    positions_T = start + torch.arange(tokens, device="cuda")
    slots = window + tokens + spare_slots
    seen = torch.arange(max(0, start - window + 1), start + tokens, device="cuda") % slots
    ring = unseen_are_nan(slots, seen, width, rope_width, format)
    compressed = None
    selected_TK = None
    if ratio:
        count = (start + tokens) // ratio
        compressed = unseen_are_nan(
            count + 5, torch.arange(count, device="cuda"), width, rope_width, format
        )
        if listed:
            selected_TK = selection(positions_T, ratio, listed)
    frequencies = inv_freq(ratio).cuda()[:: 32 // (rope_width // 2)].contiguous()
    q_THD = torch.randn(tokens, heads, width, device="cuda").bfloat16()
    keys = KeySet(ring, compressed, ratio, window)
    return Case(
        q_THD, keys, selected_TK, torch.randn(heads, device="cuda") * 2, positions_T, frequencies
    )


def check(case: Case, kernel: str = "wgmma") -> None:
    poison(64 << 20)
    out = immediately(LAUNCHERS[kernel])(*case.arguments())
    exact = case.reference()
    assert out.dtype == torch.bfloat16
    assert out.shape == exact.shape
    assert not bool(exact.isnan().any())
    error = relative_error(out, exact)
    worst = (out.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    where = divmod(int(worst.nan_to_num(torch.inf).argmax()), exact.shape[1])
    peak = float((out.float() - exact).abs().max() / exact.abs().max())
    of_row = f"worst row (token, head) {where}: {float(worst.max()):.3g}"
    message = f"error {error:.3g}, of the peak {peak:.3g}, {of_row}"
    assert error <= BOUND, message
    assert peak <= 2**-7, message


@pytest.mark.parametrize("kernel", LAUNCHERS)
@pytest.mark.parametrize(
    "format", [RowFormat.KV_FP8, RowFormat.PLAIN], ids=lambda format: format.value
)
@pytest.mark.parametrize(("heads", "listed"), [(64, 512), (128, 1024)], ids=["flash", "pro"])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_real_shapes(heads: int, listed: int, ratio: int, format: RowFormat, kernel: str) -> None:
    check(make_case(200, heads, ratio, listed if ratio == 4 else 0, 3001, format), kernel)


@pytest.mark.parametrize("kernel", LAUNCHERS)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_boundaries(ratio: int, start: int, kernel: str) -> None:
    check(make_case(17, 64, ratio, 512 if ratio == 4 else 0, start), kernel)


@pytest.mark.parametrize("tokens", [9, 63, 65, 131])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_numbers_of_tokens(ratio: int, tokens: int) -> None:
    check(make_case(tokens, 64, ratio, 512 if ratio == 4 else 0, 1000))


@pytest.mark.parametrize("heads", [1, 4, 20, 60, 68, 132])
@pytest.mark.parametrize("ratio", [4, 128])
def test_numbers_of_heads(ratio: int, heads: int) -> None:
    check(make_case(21, heads, ratio, 64 if ratio == 4 else 0, 777))


@pytest.mark.parametrize("kernel", LAUNCHERS)
@pytest.mark.parametrize("listed", [1, 2, 7, 63, 64, 65, 255, 257, 1000, 2048])
def test_lengths_of_the_list(listed: int, kernel: str) -> None:
    check(make_case(11, 64, 4, listed, 2500), kernel)


@pytest.mark.parametrize("kernel", LAUNCHERS)
def test_tiles_without_an_entry(kernel: str) -> None:
    """Lists whose only entries stand at the start, in the middle, at the end, or nowhere; several
    units per block.
    """
    case = make_case(400, 64, 4, 1024, 3000)
    assert case.selected_TK is not None
    place = torch.arange(1024, device="cuda")
    kept = [place < 5, (place > 500) & (place < 503), place == 1023, place < 0]
    keep_TK = torch.stack(kept)[torch.arange(400, device="cuda") % 4]
    case.selected_TK.masked_fill_(~keep_TK, -1)
    check(case, kernel)


@pytest.mark.parametrize(("width", "rope_width"), [(64, 16), (64, 32), (128, 64), (256, 64)])
@pytest.mark.parametrize(
    "format", [RowFormat.KV_FP8, RowFormat.PLAIN], ids=lambda format: format.value
)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_other_head_sizes(width: int, rope_width: int, ratio: int, format: RowFormat) -> None:
    check(make_case(40, 8, ratio, 16 if ratio == 4 else 0, 300, format, width, rope_width))


@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 100, 200])
def test_other_windows(window: int) -> None:
    check(make_case(30, 16, 128, 0, 250, window=window))


@pytest.mark.parametrize("spare_slots", [8, 1000, 60_000])
def test_ring_sizes(spare_slots: int) -> None:
    check(make_case(100, 64, 4, 512, 5000, spare_slots=spare_slots))


@pytest.mark.parametrize("kernel", LAUNCHERS)
def test_thousands_of_complete_entries(kernel: str) -> None:
    check(make_case(20, 128, 128, 0, 1_000_000), kernel)


@pytest.mark.parametrize("kernel", LAUNCHERS)
def test_several_waves_of_blocks(kernel: str) -> None:
    check(make_case(600, 128, 4, 1024, 0), kernel)


@pytest.mark.parametrize("kernel", LAUNCHERS)
def test_large_logits_and_sinks(kernel: str) -> None:
    case = make_case(30, 64, 4, 64, 500)
    case.q_THD.mul_(1000.0)
    case.sink_H[::2] = 200.0
    case.sink_H[1::4] = -1e9
    check(case, kernel)


def test_rows_alone_give_the_same_bits() -> None:
    case = make_case(300, 64, 4, 512, 400)
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
def test_same_bits_again_and_unchanged_caches(kernel: str) -> None:
    case = make_case(500, 64, 4, 512, 400)
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
