"""What the driver is asked to launch, with a driver that only writes it down."""

from contextlib import nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from dsv4.launch.kernel import Shape
from dsv4.launch.program import Memory, Program
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.immediate import PreparedOp, TimedOp
from dsv4.ops.norm.cuda import rms_norm
from tests.launch.fake_driver import Driver, bindings
from tests.launch.norms import CPU, NORM, TARGET, normalise


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


def test_no_tensor_is_a_null_pointer_and_a_placed_buffer_has_its_memory(driver: Driver) -> None:
    recording = Recording(TARGET, 2)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    y = recording.empty((2, 64), torch.bfloat16)
    memory = torch.zeros(4, 64, dtype=torch.bfloat16)[1:]
    recording.place(y, memory)
    normalise(recording, x, y[1:], Shape(NORM, 2, 32))
    running = Program(recording)
    running.run(2)
    (launched,) = driver.launches
    assert launched.words[:3] == [x.data_ptr(), 0, memory[1].data_ptr()]
    assert running.tensor(y[1:]).data_ptr() == memory[1].data_ptr()


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
    assert (clustered.cluster, single.cluster) == ((4, 1, 1), None)
    assert (clustered.block, single.block) == ((64, 1, 1), (96, 1, 1))
    known = bindings.CUlaunchAttributeID
    ids = [
        known.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        known.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
    ]
    assert (clustered.attribute_ids, single.attribute_ids) == (ids, ids[:1])
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


def test_the_stream_is_that_of_the_program_s_device(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", asked.append)
    for device in (torch.device("cuda", 3), torch.device("cuda")):
        recording = Recording(Target(device, "sm_90a", 132), 1)
        Program(recording, Memory(CPU, 0)).run(1)
    assert asked == [3, 0]


def test_what_a_launch_reads_lives_as_long_as_its_program(driver: Driver) -> None:
    """The driver has only its address."""
    recording = Recording(TARGET, 1)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    y = recording.empty((1, 64), torch.bfloat16)
    normalise(recording, x, y, Shape(NORM, 1, 32))
    running = Program(recording)
    memory = ref(x)
    del recording, x, y
    assert memory() is not None
    del running
    assert memory() is None


def test_a_dense_step_has_other_launches_and_fewer(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first launch is not in it: the second one may be the first of the program. Behind that
    all may start early, whatever is left out.
    """
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
    normalise(recording, x, y, Shape(NORM, 5, 32))
    recording.serve_choice(None)
    weight = recording.empty((64,), torch.float32)
    recording.choose(weight, 100)
    normalise(recording, x, y, Shape(NORM, 6, 32))
    for chosen in (y, x, weight):
        assert recording.leave_choice_out(chosen)
    running = Program(recording)
    running.run(1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 9)
    running.run(1, dense=True)
    found = [(launched.grid[0], launched.overlaps, launched.stream) for launched in driver.launches]
    sparse = [(1, 0, 100), (2, 0, 100), (4, 1, 100), (5, 1, 100), (6, 1, 100)]
    assert found == [*sparse, (3, 0, 9), (4, 1, 9), (6, 1, 9)]


def test_a_range_of_items_runs_alone_and_calls_get_their_memory(driver: Driver) -> None:
    recording = Recording(TARGET, 3)
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    y = recording.empty((3, 64), torch.bfloat16)
    calls: list[tuple[int, int]] = []
    normalise(recording, x, y, Shape(NORM, 3, 32))
    recording.call(lambda tokens, memory: calls.append((tokens, memory.data_ptr())), y)
    normalise(recording, x, y, Shape(NORM, 3, 32))
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
    assert first.tensor(counters).tolist() == [1] * 4
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
