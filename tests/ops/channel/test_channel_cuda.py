"""Channels between two GPUs: rows that go to and fro many times."""

import pytest
import torch

from dsv4.channels import Channel, Channels
from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.channel.cuda import receive_rows, send_rows
from dsv4.parallel.peer_memory import allow_peer_access, shared_memory
from dsv4.turns import Turns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ROUNDS = 20_000
VALUES = 3000
FIRST, SECOND = (torch.device("cuda", index) for index in range(2))


def connected() -> Channels:
    allow_peer_access((FIRST, SECOND))
    words = {
        (source, target): shared_memory((VALUES,), torch.int64, target)
        for source, target in ((FIRST, SECOND), (SECOND, FIRST))
    }
    return Channels(words, Turns((FIRST, SECOND)))


class End:
    """Rows of a device, and what sends or receives them."""

    def __init__(self, outgoing: Channel, incoming: Channel) -> None:
        self.device = outgoing.source
        self.rows = torch.zeros(1, VALUES, dtype=torch.int32, device=self.device)
        sends, receives, answers = (Recording(Target.of(self.device), 1) for _ in range(3))
        send_rows(sends, outgoing, self.rows)
        receive_rows(receives, incoming, self.rows)
        receive_rows(answers, incoming, self.rows)
        answers.call(lambda _, rows: rows.add_(1), self.rows)
        send_rows(answers, outgoing, self.rows)
        self._programs = {
            "send": Program(sends),
            "receive": Program(receives),
            "answer": Program(answers),
        }

    def do(self, what: str, late: bool = False) -> None:
        """Queues it on the device's current stream, or late behind it."""
        with torch.cuda.device(self.device):
            if late:
                torch.cuda._sleep(200_000)
            self._programs[what].run(1)


def test_rows_go_to_and_fro() -> None:
    """Each device adds 1 to what it gets, beside copies, now and then late, and with numbers that
    pass their largest one.
    """
    channels = connected()
    channels._begun = (1 << 32) - ROUNDS // 2
    channels.align()
    there, back = channels.between(FIRST, SECOND), channels.between(SECOND, FIRST)
    first, second = End(there, back), End(back, there)
    far = [torch.zeros(1 << 22, device=device) for device in (FIRST, SECOND)]
    copying = torch.cuda.Stream(FIRST)
    for device in (FIRST, SECOND):
        torch.cuda.synchronize(device)
    first.do("send")
    for turn in range(ROUNDS):
        second.do("answer", late=turn % 97 == 0)
        first.do("answer", late=turn % 89 == 0)
        if turn % 50 == 0:
            with torch.cuda.stream(copying):
                far[1].copy_(far[0], non_blocking=True)
    second.do("receive")
    torch.cuda.synchronize(SECOND)
    assert channels.fault_4.tolist() == [0, 0, 0, 0]
    assert bool((second.rows == 2 * ROUNDS).all())
