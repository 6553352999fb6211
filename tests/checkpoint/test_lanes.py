"""Spans of several GPUs: each puts its parts in place by a table of its own behind the span."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from dsv4.checkpoint import lanes
from dsv4.checkpoint.pieces import Span
from dsv4.ops.scatter.cuda import PART_BYTES
from tests.checkpoint.folders import CPU
from tests.checkpoint.lanes_on_the_cpu import put_lanes_on_the_cpu
from tests.ops.scatter.parts import NBYTES, expected, parts_of, untouched

GPUS = [torch.device("cuda", index) for index in range(3)]


@pytest.mark.parametrize("tables", [0, 1, 2, 3])
def test_every_gpu_gets_its_parts_with_room_for_any_number_of_tables(
    tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for a table the parts are put in place one by one."""
    put_lanes_on_the_cpu(monkeypatch, by_table=True)
    memory, parts = parts_of(CPU)
    wanted = {gpu: parts[index :: len(GPUS)] for index, gpu in enumerate(GPUS)}
    monkeypatch.setattr(lanes, "_parts", lambda _: wanted)
    room = sum(PART_BYTES * len(wanted[gpu]) for gpu in GPUS[:tables])
    read = memory[: NBYTES + room].clone()
    launched = []
    queue = lanes.Scatter.queue

    def counted(kernel: lanes.Scatter, table: int, count: int) -> None:
        launched.append((table, count))
        queue(kernel, table, count)

    monkeypatch.setattr(lanes.Scatter, "queue", counted)
    of_gpus = {gpu: [lanes.Lane(CPU, read.numel())] for gpu in GPUS}
    events = lanes.Lanes(of_gpus).queue(Span(Path("a"), 0, NBYTES, ()), read)
    assert len(events) == len(GPUS)
    counts = [len(wanted[gpu]) for gpu in GPUS[:tables]]
    # None overwrites another that may still be on its way.
    places = [NBYTES + PART_BYTES * sum(counts[:before]) for before in range(tables)]
    assert launched == list(zip(places, counts, strict=True))
    assert all(torch.equal(part.target, expected(memory, part)) for part in parts)
    assert untouched(parts)


def test_what_belongs_to_the_host_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what goes to a GPU."""
    put_lanes_on_the_cpu(monkeypatch, by_table=True)
    memory, parts = parts_of(CPU)
    monkeypatch.setattr(lanes, "_parts", lambda _: {CPU: parts[::2], GPUS[0]: parts[1::2]})
    read = memory[: NBYTES + PART_BYTES * len(parts)].clone()
    made = lanes.Lanes({GPUS[0]: [lanes.Lane(CPU, read.numel())]})
    assert len(made.queue(Span(Path("a"), 0, NBYTES, ()), read)) == 1
    assert all(torch.equal(part.target, expected(memory, part)) for part in parts)
    assert untouched(parts)


@pytest.mark.parametrize(
    ("ranges", "copied"),
    [
        ([(0, 4), (14, 16)], [(0, 16)]),
        ([(15, 16), (0, 4)], [(0, 4), (15, 16)]),
        ([(0, 100), (10, 20), (105, 110)], [(0, 110)]),
    ],
)
def test_what_lies_close_together_is_copied_at_once(
    ranges: list[tuple[int, int]],
    copied: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "_GAP", 10)
    assert list(lanes._joined(ranges)) == copied


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_nothing_runs_on_lanes_that_have_ended(
    error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_lanes_on_the_cpu(monkeypatch, by_table=False)
    of_device: set[int] = set()
    ended: list[int] = []
    monkeypatch.setattr(lanes.Lane, "end", lambda lane: ended.append(id(lane)))

    def run() -> None:
        with lanes.lanes_to([CPU], 64) as made:
            of_device.update(id(next(made._turns[CPU])) for _ in range(9))
            if error is not None:
                raise error

    with nullcontext() if error is None else pytest.raises(error):
        run()
    assert len(ended) == lanes.LANES
    assert set(ended) == of_device
