"""Both ends of a channel, executed on the CPU: what is sent arrives once, whatever was sent before,
and the host is told of what does not come.
"""

import pytest
import torch
from torch import Tensor

from dsv4.channels import Channel
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.channel.cuda import receive_rows, send_rows, take_tokens
from tests.ops.cases import normal
from tests.ops.channel.made import CPU, channel_on_cpu
from tests.ops.exchange.one_inbox import SOON
from tests.ops.executed import execute
from tests.ptx.faults import Deadlock, Trap
from tests.ptx.nvrtc import SourceEdit
from tests.ptx.schedule import SCHEDULES

LAST_USE = (1 << 31) - 1
FAULTS = {
    "tags are not compared": SourceEdit(
        "channel.cu", "if (tag_of(found) == tag) return", "if (true) return"
    ),
    "rows of wider memory follow each other": SourceEdit("channel.cu", "* pitch", "* width"),
    "the last value is left out": SourceEdit(
        "channel.cu", "if (at < count) store_word", "if (at + 1 < count) store_word"
    ),
}


def recording() -> Recording:
    return Recording(Target(CPU, "sm_90a", 132), 8)


def send(channel: Channel, rows: Tensor, edit: SourceEdit | None = None) -> None:
    made = recording()
    send_rows(made, channel, rows)
    execute(made, 1, edit, SCHEDULES["random"])


def receive(
    channel: Channel, rows: Tensor, edit: SourceEdit | None = None, schedule: str = "random"
) -> None:
    made = recording()
    receive_rows(made, channel, rows)
    execute(made, 1, edit, SCHEDULES[schedule])


def carried(
    channel: Channel, rows: Tensor, room: int, first: int, edit: SourceEdit | None = None
) -> Tensor:
    """``rows`` behind ``first`` columns of others, ``room`` wide."""
    found = torch.full((rows.shape[0], room), 7.0, dtype=rows.dtype)
    in_sender = edit is not None and "store_word" in edit.text
    send(channel, rows, edit if in_sender else None)
    receive(channel, found[:, first : first + rows.shape[1]], None if in_sender else edit)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("use", [1, 77, LAST_USE])
def test_what_is_sent_arrives(use: int, schedule: str) -> None:
    """Two uses: the second overwrites the first."""
    channel = channel_on_cpu(1024, use)
    for seed in (1, 2):
        rows = normal(3, 100, seed=seed).bfloat16()
        rows[0, :4] = torch.tensor([torch.nan, -0.0, torch.inf, 0.0])
        found = torch.zeros_like(rows)
        send(channel, rows)
        receive(channel, found, schedule=schedule)
        assert torch.equal(found.view(torch.int16), rows.view(torch.int16))
    ends = [int(count) >> 32 for count in (channel.sent_1, channel.received_1)]
    wrapped = (use + 2 + (1 << 31)) % (1 << 32) - (1 << 31)
    assert ends == [wrapped, wrapped]


def test_columns_of_wider_rows_leave_the_others_alone() -> None:
    rows = normal(3, 320, seed=1)
    found = carried(channel_on_cpu(1024), rows, 500, 128)
    assert torch.equal(found[:, 128:448], rows)
    assert bool((found[:, :128] == 7).all() & (found[:, 448:] == 7).all())


@pytest.mark.parametrize("width", [1, 3])
def test_values_of_two_rows(width: int) -> None:
    """Of an odd number of 16-bit columns."""
    channel = channel_on_cpu(64)
    rows = normal(4, width, seed=1).bfloat16()
    found = torch.zeros_like(rows)
    send(channel, rows)
    receive(channel, found)
    assert torch.equal(found, rows)


@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_of_an_odd_number_of_halves(tokens: int) -> None:
    """Nothing behind them is touched; what was sent before had whole values."""
    channel = channel_on_cpu(64)
    whole = normal(2, 5, seed=2).bfloat16()
    send(channel, whole)
    receive(channel, torch.zeros_like(whole))
    rows = normal(tokens, 5, seed=1).bfloat16()
    memory = torch.full((5 * tokens + 1,), 7.0, dtype=torch.bfloat16)
    send(channel, rows)
    receive(channel, memory[:-1].view(tokens, 5))
    assert torch.equal(memory[:-1].view(tokens, 5), rows)
    assert memory[-1] == 7


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    channel = channel_on_cpu(1024)
    rows = normal(3, 320, seed=1)
    send(channel, torch.full_like(rows, 5.0))
    receive(channel, torch.empty_like(rows))
    if fault == "tags are not compared":
        # What was sent before is taken for what has not come.
        found = torch.zeros_like(rows)
        receive(channel, found, FAULTS[fault])
        assert bool((found == 5).all())
        return
    try:
        found = carried(channel, rows, 500, 128, FAULTS[fault])
    except Deadlock:
        return
    assert not torch.equal(found[:, 128:448], rows)


def test_words_of_other_uses_are_waited_for() -> None:
    channel = channel_on_cpu(64)
    rows = normal(1, 32, seed=1)
    for words_W in (torch.zeros_like(channel.words_W), torch.full_like(channel.words_W, -1)):
        channel.words_W.copy_(words_W)
        with pytest.raises(Deadlock):
            receive(channel, torch.empty_like(rows))
        channel.received_1.copy_(channel.sent_1)
    send(channel, rows)
    channel.words_W[17] = 5
    with pytest.raises(Deadlock):
        receive(channel, torch.empty_like(rows))


def test_the_host_is_told_who_waits_for_whom() -> None:
    channel = channel_on_cpu(64, 41)
    with pytest.raises(Trap):
        receive(channel, torch.empty(1, 32), SOON)
    assert channel.fault_4.tolist() == [1, 0, 1, 41]


def take(channel: Channel, given: int) -> tuple[int, int]:
    """The token, of 9 before, and what says whether the host has given it."""
    token_1, given_1 = torch.tensor([9]), torch.tensor([given])
    made = recording()
    take_tokens(made, channel, token_1, given_1)
    execute(made, 1)
    return int(token_1), int(given_1)


def test_a_token_comes_from_the_host_or_from_the_channel() -> None:
    channel = channel_on_cpu(8)
    assert take(channel, given=1) == (9, 0)
    for token in (0, 129_279, (1 << 40) + 3):
        send(channel, torch.tensor(token))
        assert take(channel, given=0) == (token, 0)
    assert int(channel.received_1) == int(channel.sent_1) == 4 << 32
    with pytest.raises(Deadlock):
        take(channel, given=0)


def test_what_no_sampler_chose_becomes_a_token_that_exists() -> None:
    channel = channel_on_cpu(8)
    send(channel, torch.tensor(-1))
    assert take(channel, given=0) == (0, 0)
