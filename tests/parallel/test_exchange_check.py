"""GPUs that cannot exchange words are refused in one line; those that can are checked once."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4.command.errors import user_message
from dsv4.demo import CHECKPOINT
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.native import verdict_file
from dsv4.native.check import Result, Verdict
from dsv4.native.child import checks_of
from dsv4.opened_checkpoint import OpenedCheckpoint
from dsv4.parallel.exchange_check import check_exchange, wrong_sums
from dsv4.parallel.known_exchanges import KnownExchanges

GPUS = [torch.device("cuda", index) for index in range(2)]
PASSED = Verdict((Result("2 GPUs", "exchange", "passed"),))
WRONG = "found 3 of 4194304 sums wrong on rank 1, expected none"
FAILED = Verdict((Result("2 GPUs", "exchange", "failed", WRONG),))


class Machine:
    """GPUs that are not there, and what a child process says of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, float]] = []
        self.verdict = PASSED
        self.uuids = ["a", "b"]
        self.reached = True
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA X")
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.properties)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: self.reached)
        monkeypatch.setattr(verdict_file, "run_checks", self.run_checks)

    def properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=self.uuids[device.index])

    def run_checks(self, checks: str, device: torch.device, seconds: float) -> Verdict:
        self.asked.append((checks, seconds))
        return self.verdict


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path))
    return Machine(monkeypatch)


def test_the_same_gpus_are_checked_once(machine: Machine) -> None:
    for _ in range(2):
        check_exchange(GPUS)
    assert machine.asked == [("dsv4.parallel.exchange_check:on_2_gpus", 120.0)]
    machine.uuids = ["b", "a"]
    check_exchange(GPUS)
    assert len(machine.asked) == 2


def test_a_fault_is_one_line_and_is_looked_for_again(machine: Machine) -> None:
    machine.verdict = FAILED
    for _ in range(2):
        with pytest.raises(UserError) as refused:
            check_exchange(GPUS)
        assert user_message(refused.value) == (
            "--parallel tensor: exchange (2 GPUs): found 3 of 4194304 sums wrong on rank 1, "
            "expected none"
        )
    assert len(machine.asked) == 2
    machine.verdict = PASSED
    check_exchange(GPUS)


def test_gpus_without_peer_access_are_refused_at_once(machine: Machine) -> None:
    machine.reached = False
    with pytest.raises(UserError) as refused:
        check_exchange(GPUS)
    assert user_message(refused.value) == (
        "--parallel tensor: found no peer access from cuda:0 to cuda:1, expected GPUs that reach "
        "each other's memory"
    )
    assert machine.asked == []


def test_ranks_that_reach_nobody_read_no_weight(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.reached = False
    monkeypatch.setattr("dsv4.opened_checkpoint.loading_ranks", None)
    ranks = EngineConfig(gpus=2, parallel="tensor")
    opened = OpenedCheckpoint.open(CHECKPOINT, ranks, 2 * 10**9)
    reading = opened.reading(None, None)
    with pytest.raises(UserError, match="found no peer access from cuda:0 to cuda:1"):
        reading.__enter__()


def test_access_has_to_go_both_ways(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair == (*GPUS,))
    with pytest.raises(UserError, match="found no peer access from cuda:1 to cuda:0"):
        check_exchange(GPUS)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_child_finds_the_check_of_so_many_gpus(
    gpus: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [torch.device("cuda", index) for index in range(gpus)]
    machine.uuids = list("abcdefgh")
    check_exchange(devices)
    assert machine.asked[0][0] == f"dsv4.parallel.exchange_check:on_{gpus}_gpus"
    (check,) = checks_of(f"dsv4.parallel.exchange_check:on_{gpus}_gpus")
    assert (check.name, check.kernel) == (f"{gpus} GPUs", "exchange")
    monkeypatch.setattr("dsv4.parallel.exchange_check.wrong_sums", str)
    assert check.run(devices[-1]) == str(devices)


def test_wrong_sums_are_those_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    class Known:
        exchanges = 4
        counts: tuple[int, int] = (0, 0)

        def __init__(self, devices: list[torch.device], width: int) -> None:
            assert (devices, width) == (GPUS, 4096)

        def run(self) -> None:
            steps.append(1)

        def wrong(self) -> list[int]:
            return list(self.counts)

    monkeypatch.setattr("dsv4.parallel.exchange_check.KnownExchanges", Known)
    assert wrong_sums(GPUS) is None
    assert len(steps) == 8
    Known.counts = (0, 3)
    assert wrong_sums(GPUS) == "found 3 of 131072 sums wrong on rank 1, expected none"


def test_a_step_has_whole_turns_of_the_slots() -> None:
    with pytest.raises(ValueError, match="exchanges: found 3, expected a multiple of 2"):
        KnownExchanges(GPUS, 8, exchanges=3)
