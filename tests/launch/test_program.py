"""What the driver is asked to launch, with a driver that only writes it down."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.launch import prepared
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.program import Memory, Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.immediate import PreparedOp, TimedOp
from dsv4.ops.norm.cuda import rms_norm
from tests.launch.fake_driver import Driver, bindings

CPU = torch.device("cpu")
TARGET = Target(CPU, "sm_90a", 132)
NORM = Kernel("norm/rms_norm", "rms_norm")
SORT = Kernel("moe/moe_sort", "moe_sort")


def normalise(recording: Recording, x: Tensor, y: Tensor, shape: Any) -> None:
    recording.launch(shape, x=x, weight=None, y=y, width=x.shape[1], eps=1e-6)


def test_arguments_arrive_by_name_in_the_order_of_the_signature(driver: Driver) -> None:
    recording = Recording(TARGET, 2)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    weight = recording.empty((64,), torch.float32)
    y = recording.empty((2, 64), torch.bfloat16)
    recording.launch(Shape(NORM, 2, 32), eps=0.5, width=64, y=y[1:], x=x[1:], weight=weight[4:])
    running = Program(recording)
    running.run(2)
    (launched,) = driver.launches
    addresses = [one.data_ptr() for one in (x[1:], *map(running.tensor, (weight[4:], y[1:])))]
    assert launched.words == [*addresses, 64, 0.5]
    assert len({running.tensor(buffer).data_ptr() for buffer in (weight, y)}) == 2
    assert running.tensor(y).data_ptr() % 16 == 0
    assert running.tensor(x) is x


def test_the_configuration_has_the_grid_the_cluster_and_the_stream(driver: Driver) -> None:
    recording = Recording(TARGET, 1)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    y = recording.empty((1, 64), torch.bfloat16)
    normalise(recording, x, y, Shape(NORM, (8, 3), 64, shared_bytes=1000, cluster=4))
    normalise(recording, x, y, Shape(NORM, 5, 96))
    Program(recording).run(1)
    clustered, single = driver.launches
    assert (clustered.grid, clustered.threads, clustered.shared_bytes) == ((8, 3, 1), 64, 1000)
    assert (single.grid, single.threads, single.shared_bytes) == ((5, 1, 1), 96, 0)
    assert (clustered.attributes, single.attributes) == (2, 1)
    assert {launched.stream for launched in driver.launches} == {100}


@pytest.mark.parametrize(("early", "overlaps"), [(False, [0, 1, 0, 1]), (True, [1, 1, 0, 1])])
def test_what_is_in_front_of_a_program_and_a_call_end_before_what_follows(
    driver: Driver, early: bool, overlaps: list[int]
) -> None:
    recording = Recording(TARGET, 1)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    y = recording.empty((1, 64), torch.bfloat16)
    for _ in range(2):
        normalise(recording, x, y, Shape(NORM, 1, 32))
        normalise(recording, x, y, Shape(NORM, 1, 32))
        recording.call(lambda tokens: None)
    Program(recording, early=early).run(1)
    assert [launched.overlaps for launched in driver.launches] == overlaps


def test_runs_of_timed_ops_overlap_and_those_of_others_do_not(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "of", lambda device: TARGET)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    for kind in (PreparedOp, TimedOp):
        kind(rms_norm, x, torch.ones(64), 1e-6).run()
    assert [launched.overlaps for launched in driver.launches] == [0, 1]


@pytest.mark.parametrize("shape", [Shape(NORM, 1, 32), lambda tokens: Shape(NORM, tokens, 32)])
def test_a_program_follows_the_current_stream(
    shape: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(TARGET, 2)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    normalise(recording, x, recording.empty((2, 64), torch.bfloat16), shape)
    running = Program(recording)
    for stream, tokens in ((7, 2), (7, 2), (9, 2), (9, 1), (7, 1)):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _, s=stream: s)
        running.run(tokens)
    assert [launched.stream for launched in driver.launches] == [7, 7, 9, 9, 7]


def test_shorter_chunks_take_their_own_shapes_and_the_longest_its_own_again(
    driver: Driver,
) -> None:
    """The second launch has nothing to do below 40 tokens."""
    recording = Recording(TARGET, 64)
    ids = torch.zeros(64, dtype=torch.int64)
    sizes = {"slots": (64,), "tiles": (8, 4), "tile_count": (1,)}
    outputs = {name: recording.empty(size, torch.int32) for name, size in sizes.items()}

    def sort(first: int) -> None:
        def shape(tokens: int) -> Shape | None:
            if tokens <= first:
                return None
            return Shape(SORT, 1 + tokens // 16, 32, 4 * tokens, numbers={"count": tokens - first})

        recording.launch(shape, ids=ids, **outputs, experts=8, tile=128)

    sort(0)
    sort(40)
    running = Program(recording)
    for tokens in (64, 30, 50, 64):
        running.run(tokens, dense=tokens == 50)
    found = [
        (launched.grid[0], launched.shared_bytes, launched.words[4]) for launched in driver.launches
    ]
    whole = [(5, 256, 64), (5, 256, 24)]
    assert found == [*whole, (2, 120, 30), (4, 200, 50), (4, 200, 10), *whole]


def test_the_longest_chunk_may_have_nothing_to_do(driver: Driver) -> None:
    recording = Recording(TARGET, 64)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    y = recording.empty((64, 64), torch.bfloat16)
    normalise(recording, x, y, lambda tokens: Shape(NORM, tokens, 32) if tokens <= 40 else None)
    running = Program(recording)
    for tokens in (64, 40, 64):
        running.run(tokens)
    assert [launched.grid[0] for launched in driver.launches] == [40]


def test_a_dense_step_has_other_launches_and_fewer(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first launch is not in it: the second one may be the first of the program."""
    recording = Recording(TARGET, 1)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    y = recording.empty((1, 64), torch.bfloat16)
    normalise(recording, x, y, Shape(NORM, 1, 32))
    recording.serve_choice(None)
    recording.choose(y, 100)
    normalise(recording, x, y, Shape(NORM, 2, 32))
    recording.serve_choice(Shape(NORM, 3, 32))
    recording.choose(x, 100)
    normalise(recording, x, y, Shape(NORM, 4, 32))
    assert recording.leave_choice_out(y)
    assert recording.leave_choice_out(x)
    running = Program(recording)
    running.run(1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 9)
    running.run(1, dense=True)
    found = [(launched.grid[0], launched.overlaps, launched.stream) for launched in driver.launches]
    assert found == [(1, 0, 100), (2, 0, 100), (4, 1, 100), (3, 0, 9), (4, 1, 9)]


def test_other_chunks_may_take_another_kernel_in_other_blocks(driver: Driver) -> None:
    recording = Recording(TARGET, 64)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    few = Shape(Kernel(NORM.source, NORM.function, (("FEW", 1),)), 1, 64, cluster=1)
    some = Shape(NORM, 2, 96, cluster=2)

    def shape(tokens: int) -> Shape:
        return few if tokens < 20 else some

    normalise(recording, x, recording.empty((64, 64), torch.bfloat16), shape)
    running = Program(recording)
    for tokens in (64, 10, 30, 10):
        running.run(tokens)
    assert [
        (launched.kernel, launched.threads, launched.attributes) for launched in driver.launches
    ] == [(taken.kernel, taken.threads, taken.cluster) for taken in (some, few, some, few)]


def test_shared_memory_is_asked_for_once_for_each_kernel_and_more_of_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the longest chunk, which is prepared twice, and by others."""
    asked: list[tuple[Kernel, int]] = []
    monkeypatch.setattr(
        prepared, "allow_shared_memory", lambda kernel, _, nbytes: asked.append((kernel, nbytes))
    )
    few = Kernel(NORM.source, NORM.function, (("FEW", 1),))
    shapes = {1: (few, 20_000), 2: (few, 30_000), 3: (NORM, 20_000), 4: (NORM, 1_000), 64: (few, 0)}
    recording = Recording(TARGET, 64)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)

    def shape(tokens: int) -> Shape:
        kernel, nbytes = shapes[tokens]
        return Shape(kernel, 1, 32, nbytes)

    normalise(recording, x, recording.empty((64, 64), torch.bfloat16), shape)
    running = Program(recording)
    for tokens in (1, 2, 1, 3, 4, 2, 3):
        running.run(tokens)
    assert asked == [shapes[tokens] for tokens in (1, 2, 3, 2, 3)]


def test_a_range_of_items_runs_alone_and_calls_get_their_memory(driver: Driver) -> None:
    recording = Recording(TARGET, 3)
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    y = recording.empty((3, 64), torch.bfloat16)
    calls: list[tuple[int, int]] = []
    normalise(recording, x, y, Shape(NORM, 3, 32))
    recording.call(lambda tokens, memory: calls.append((tokens, memory.data_ptr())), y)
    running = Program(recording)
    running.run(3, 1, 2)
    assert driver.launches == []
    assert calls == [(3, running.tensor(y).data_ptr())]


def test_zeroed_counters_belong_to_one_program_and_are_shared_inside_it(driver: Driver) -> None:
    def counted() -> tuple[Program, Tensor]:
        recording = Recording(TARGET, 1)
        assert recording.zeroed("counters", 4) is recording.zeroed("counters", 4)
        counters = recording.zeroed("counters", 4)
        return Program(recording), counters

    first, counters = counted()
    second, others = counted()
    assert first.tensor(counters).tolist() == [0] * 4
    first.tensor(counters).fill_(1)
    assert second.tensor(others).tolist() == [0] * 4


def test_programs_share_memory_that_is_large_enough(driver: Driver) -> None:
    recording = Recording(TARGET, 1)
    x = torch.zeros(1, 4096, dtype=torch.bfloat16)
    y = recording.empty((1, 4096), torch.bfloat16)
    normalise(recording, x, y, Shape(NORM, 1, 32))
    memory = Memory(CPU, 8192)
    running = Program(recording, memory)
    assert running.tensor(y).data_ptr() == memory.bytes.data_ptr()
    small = Memory(CPU, 4096)
    assert Program(recording, small).tensor(y).data_ptr() != small.bytes.data_ptr()


def test_an_error_of_the_driver_names_the_kernel(driver: Driver) -> None:
    recording = Recording(TARGET, 1)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    normalise(recording, x, recording.empty((1, 64), torch.bfloat16), Shape(NORM, 1, 32))
    driver.error = bindings.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    expected = "^CUDA driver error: CUDA_ERROR_ILLEGAL_ADDRESS at a launch of rms_norm"
    with pytest.raises(RuntimeError, match=expected):
        Program(recording).run(1)
