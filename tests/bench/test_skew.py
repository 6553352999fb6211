"""The skew of ranks from invented stamps, and on two GPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.bench.__main__ import main
from dsv4.bench.skew import bench_skew, spread, summary, table
from dsv4.errors import UserError
from dsv4.parallel.rank_state import connect
from dsv4.parallel.stamps import FOUND, PUSHED, STEPS, Offset, moments, offset, stamped
from dsv4.peers import LOGITS_EXCHANGE, MOST_EXCHANGES, InboxLayout, Peers
from tests.ranks.on_gpu import two_gpus
from tests.ranks.simulated import ranks_engine

HOP = 700.0
STILL = Offset(5_000_000_123.0, HOP)
# A GPU's clock counts from 1970 on.
START = 1_763_851_234_000_000_123
TOKENS = 20
USED = [0, 1, 2, 3, LOGITS_EXCHANGE]


def stamps(skew_ns: float, clock: float, drift: float = 0.0) -> Tensor:
    """Exchanges every 20 µs, to which rank 1 comes later by this; its clock is another one."""
    times = torch.zeros(2, TOKENS, MOST_EXCHANGES, 2, dtype=torch.int64)
    number = torch.arange(TOKENS * len(USED)).view(TOKENS, len(USED)).double()
    pushed = 20_000.0 * number
    late = pushed + skew_ns
    moved = clock + drift * pushed / pushed.max()
    times[0, :, USED, PUSHED] = START + pushed.long()
    times[1, :, USED, PUSHED] = START + (late + moved).long()
    times[0, :, USED, FOUND] = START + torch.maximum(pushed, late + HOP).long()
    times[1, :, USED, FOUND] = START + (torch.maximum(late, pushed + HOP) + moved).long()
    return times


def test_the_skew_is_what_is_left_of_the_clocks() -> None:
    found = summary(stamps(1500.0, STILL.clock), STILL, STILL)
    assert (found["tokens"], found["hop_us"], found["clocks_moved_us"]) == (TOKENS, 0.7, 0.0)
    assert list(found["by_kind"]) == ["attention", "experts", "logits"]
    for kind in found["by_kind"].values():
        assert kind["skew_us"] == {"median": 1.5, "p95": 1.5}
        assert kind["rank_1_later_us"] == {"median": 1.5, "p95": 1.5}
        waits = [one["median"] for one in kind["from_own_word_to_all_us"]]
        assert waits == [2.2, 0.0]
    assert len(found["skew_us_by_exchange"]) == len(USED)


def test_a_rank_that_is_earlier_has_no_other_skew() -> None:
    found = summary(stamps(-1500.0, STILL.clock), STILL, STILL)["by_kind"]["experts"]
    assert found["skew_us"]["median"] == 1.5
    assert found["rank_1_later_us"]["median"] == -1.5


def test_clocks_that_move_are_followed() -> None:
    after = Offset(STILL.clock + 3000.0, HOP)
    found = summary(stamps(400.0, STILL.clock, 3000.0), STILL, after)
    assert found["clocks_moved_us"] == 3.0
    for kind in found["by_kind"].values():
        assert kind["skew_us"]["p95"] == pytest.approx(0.4, abs=0.005)


def test_an_exchange_without_a_stamp_is_an_error() -> None:
    times = stamps(0.0, STILL.clock)
    times[1, 3, 2, FOUND] = 0
    with pytest.raises(UserError, match="--skew: found exchanges without a stamp"):
        summary(times, STILL, STILL)


def test_half_and_almost_all_of_the_values_are_below() -> None:
    assert spread(torch.arange(101).double()) == {"median": 50.0, "p95": 95.0}


def test_the_table_has_a_line_for_every_kind() -> None:
    lines = table(summary(stamps(1500.0, STILL.clock), STILL, STILL)).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["attention", "experts", "logits"]
    assert lines[1].split()[1:] == ["1.50", "(1.50)", "2.20", "(2.20)", "0.00", "(0.00)"]
    assert lines[-1].startswith(f"median (95 %) of {TOKENS} tokens; a word takes 0.7 µs")


def test_stamps_have_an_address_behind_all_others() -> None:
    view = Peers.planned(1, InboxLayout(2, 64, 32), 16)
    table_P = torch.arange(view.table_P.numel())
    found = stamped(Peers(**{**vars(view), "table_P": table_P}))
    assert found.stamps_X2 is not None
    assert found.table_P.tolist() == [*range(11), found.stamps_X2.data_ptr()]
    assert moments(found).shape == (64, MOST_EXCHANGES, 2)


class TwoClocks:
    """``KnownExchanges`` of two ranks, which push when they are run; rank 1 has another clock. Most
    words are held up on their way, and stamps are there when they have been waited for.
    """

    def __init__(
        self,
        devices: list[torch.device],
        width: int,
        exchanges: int,
        view: Callable[[Peers], Peers],
    ) -> None:
        self.peers = [view(one) for one in connect(InboxLayout(2, width, 2), devices, 1)]
        self.clocks = (0, int(STILL.clock))
        self.now = START
        self.queued: list[tuple[int, int]] = []

    def run(self) -> None:
        for rank in range(2):
            self.run_rank(rank)

    def run_rank(self, rank: int) -> None:
        self.now += 10_000
        self.queued.append((rank, self.now))

    def wrong(self) -> list[int]:
        while self.queued:
            step = [self.queued.pop(0) for _ in range(2)]
            self.stamp(dict(step))
        return [0, 0]

    def stamp(self, pushed: dict[int, int]) -> None:
        for own, (peers, clock) in enumerate(zip(self.peers, self.clocks, strict=True)):
            assert peers.stamps_X2 is not None
            peers.step_4[0] += 1
            step = int(peers.step_4[0]) % STEPS
            first_of_step = peers.stamps_X2[step * MOST_EXCHANGES]
            first_of_step[PUSHED] = clock + pushed[own]
            arrived = pushed[1 - own] + int(HOP) + (0 if step == 5 else 400)
            first_of_step[FOUND] = clock + max(pushed[own], arrived)


def test_a_word_either_way_tells_how_far_clocks_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4.parallel.stamps.KnownExchanges", TwoClocks)
    assert offset([torch.device("cpu")] * 2) == STILL


def test_ranks_of_torch_ops_have_no_skew() -> None:
    with pytest.raises(UserError, match="--skew: expected a rank of CUDA ops on each of two GPUs"):
        bench_skew(ranks_engine(2), 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--geometry v4-flash --gpus 2", "--skew: found --parallel pipeline --gpus 2, expected"),
        ("--gpus 2 --parallel tensor", "--skew: found with --model, expected only with --geometry"),
    ],
)
def test_skew_is_of_two_ranks(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--skew", *flags.split()]) == 2
    assert f"error: {message}" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_are_measured() -> None:
    """The same clocks twice, and steps afterwards that are those of before."""
    gpus = [torch.device("cuda", index) for index in range(2)]
    one, two = offset(gpus), offset(gpus)
    assert 100 < one.hop < 1_000_000
    # Beside other processes a hop takes longer, and clocks are known no better than that.
    assert abs(one.clock - two.clock) < 20_000 + one.hop + two.hop
    engine = two_gpus(cuda_graph="full")
    engine.prefill(range(20, 60))
    expected = engine.decode([7]).cpu()
    found: dict[str, Any] = bench_skew(engine, 40)
    assert set(found["by_kind"]) == {"attention", "experts", "logits"}
    for kind in found["by_kind"].values():
        assert 0 <= kind["skew_us"]["median"] < 1000
    engine.reset()
    engine.prefill(range(20, 60))
    assert torch.equal(engine.decode([7]).cpu(), expected)
