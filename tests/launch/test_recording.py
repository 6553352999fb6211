"""What a recording notes, and what it refuses before anything can run."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.integers import ceil_div, round_up
from dsv4.launch.buffers import byte_offset, is_aligned, storage_key
from dsv4.launch.items import Call, Launch
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.shapes import by_tokens
from dsv4.launch.target import ARCHITECTURES, Target, compile_target

TARGET = Target(torch.device("cuda", 0), "sm_90a", 132)
# A kernel of the package with pointers and one number.
STORE = Kernel("token_ring/token_ring", "store_token")


def store_arguments(recording: Recording) -> dict[str, Any]:
    """Everything ``store_token`` takes but the number of slots."""
    shapes: dict[str, tuple[int, ...]] = {
        "token": (),
        "position": (1,),
        "next": (1,),
        "ring": (16,),
    }
    tensors = {name: recording.empty(shape, torch.int64) for name, shape in shapes.items()}
    return {**tensors, "nan": recording.empty((1,), torch.int32)}


def test_buffers_are_contiguous_and_known_with_their_views() -> None:
    recording = Recording(TARGET, 8)
    buffer = recording.empty((8, 64), torch.bfloat16)
    assert buffer.is_meta
    assert buffer.is_contiguous()
    assert (buffer.shape, buffer.dtype) == ((8, 64), torch.bfloat16)
    view = buffer[2:4, 32:].unflatten(1, (2, 16))
    for tensor in (buffer, view, buffer.view(torch.int16)):
        assert recording.owns(tensor)
        assert storage_key(tensor) == storage_key(buffer)
    like = recording.empty_like(view)
    assert recording.owns(like)
    assert (like.shape, like.dtype, like.is_contiguous()) == (view.shape, view.dtype, True)
    assert storage_key(like) != storage_key(buffer)
    for stranger in (torch.empty(4), torch.empty(4, device="meta"), buffer.float()):
        assert not recording.owns(stranger)
    assert not Recording(TARGET, 8).owns(buffer)


def test_a_buffer_stays_as_long_as_its_recording() -> None:
    """Else a stranger's storage could get the key of one that nobody else has kept."""
    recording = Recording(TARGET, 8)
    buffer = weakref.ref(recording.empty((8, 64), torch.bfloat16))
    kept = buffer()
    assert kept is not None
    assert recording.owns(kept)


def test_places_inside_a_buffer() -> None:
    buffer = Recording(TARGET, 8).empty((8, 64), torch.bfloat16)
    assert byte_offset(buffer[3]) == 3 * 128
    assert is_aligned(buffer)
    assert is_aligned(buffer[0, 8:])
    assert not is_aligned(buffer[0, 4:])
    assert is_aligned(buffer[0, 2:], 4)
    # Its storage begins at an odd address.
    real = torch.frombuffer(bytearray(64), dtype=torch.uint8, offset=1)
    first = -real.data_ptr() % 16
    assert is_aligned(real[first:])
    assert not is_aligned(real[first + 1 :])


def test_counters_are_one_tensor_by_name() -> None:
    recording = Recording(TARGET, 1)
    arrivals = recording.zeroed("arrivals", 64)
    assert recording.zeroed("arrivals", 64) is arrivals
    others = recording.zeroed("others", 64)
    assert storage_key(others) != storage_key(arrivals)
    assert (arrivals.dtype, arrivals.shape) == (torch.int32, (64,))
    assert not recording.owns(arrivals)
    assert [id(tensor) for tensor in recording.zeroed_tensors] == [id(arrivals), id(others)]
    for count in (63, 65):
        message = f"arrivals: found {count} counters, expected 64 as asked"
        with pytest.raises(ValueError, match=message):
            recording.zeroed("arrivals", count)
    assert Recording(TARGET, 1).zeroed("arrivals", 65).shape == (65,)


def test_a_launch_is_noted_with_its_signature_and_arguments() -> None:
    recording = Recording(TARGET, 1)
    arguments = store_arguments(recording)
    recording.launch(Shape(STORE, 1, 32), **arguments, slots=16)
    (item,) = recording.items
    assert isinstance(item, Launch)
    assert item.signature.kernel == "store_token"
    assert item.shape == Shape(STORE, 1, 32)
    assert item.shape_of is None
    assert item.arguments == {**arguments, "slots": 16}
    assert [id(tensor) for tensor in item.tensors] == [id(one) for one in arguments.values()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": None}, "store_token: slots: found None, expected int"),
        ({"slot": 16}, "store_token: slot: not an argument"),
        ({"ring": torch.empty(16)}, "store_token: ring: found torch.float32, expected int64"),
    ],
)
def test_wrong_arguments_are_refused_and_not_noted(changes: dict[str, Any], message: str) -> None:
    recording = Recording(TARGET, 1)
    arguments = {**store_arguments(recording), "slots": 16, **changes}
    with pytest.raises(TypeError, match=message):
        recording.launch(Shape(STORE, 1, 32), **arguments)
    assert recording.items == []


def test_a_missing_argument_is_refused() -> None:
    recording = Recording(TARGET, 1)
    with pytest.raises(TypeError, match="store_token: slots: missing"):
        recording.launch(Shape(STORE, 1, 32), **store_arguments(recording))


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(KeyError, match="found no .* store_nothing"):
        Recording(TARGET, 1).launch(Shape(Kernel("token_ring/token_ring", "store_nothing"), 1, 32))


def test_a_shape_by_tokens_is_checked_at_its_longest() -> None:
    recording = Recording(TARGET, 100)
    asked: list[int] = []

    def shape_of(tokens: int) -> Shape | None:
        asked.append(tokens)
        return None if tokens > 96 else Shape(STORE, tokens, 32, numbers={"slots": tokens})

    arguments = store_arguments(recording)
    recording.launch(shape_of, **arguments)
    (item,) = recording.items
    assert isinstance(item, Launch)
    assert (item.shape.blocks, asked) == (96, [100, 99, 98, 97, 96])
    assert item.shape_of is shape_of
    assert "slots" not in item.arguments
    with pytest.raises(TypeError, match="slots: missing"):
        recording.launch(lambda tokens: Shape(STORE, 1, 32), **arguments)
    with pytest.raises(ValueError, match="shape: found None for 1 to 100 tokens"):
        recording.launch(lambda tokens: None, **arguments)
    assert len(recording.items) == 1


def test_a_shape_that_launches_have_in_common_is_asked_for_no_more_tokens() -> None:
    asked: list[int] = []

    def shape_of(slots: int, tokens: int) -> Shape:
        asked.append(tokens)
        return Shape(STORE, tokens, 32, numbers={"slots": slots})

    recording = Recording(TARGET, 100)
    recording.launch(by_tokens(shape_of, 16), **store_arguments(recording))
    (item,) = recording.items
    assert isinstance(item, Launch)
    assert (item.shape.blocks, max(asked)) == (100, 100)


def test_calls_and_kept_tensors() -> None:
    recording = Recording(TARGET, 1)
    buffer = recording.empty((4,), torch.float32)
    weight = torch.empty(4, device="meta")

    def function(tokens: int, *tensors: torch.Tensor) -> None:
        raise AssertionError("recording runs nothing")

    recording.call(function, buffer, weight)
    assert recording.items == [Call(function, [buffer, weight])]
    view = buffer[:2]
    assert recording.keep(view) is view
    assert [id(tensor) for tensor in recording.kept] == [id(view)]


@pytest.mark.parametrize("reach", [(100, 60), (60, 100)])
def test_a_step_is_dense_where_every_choice_is_all_there_is(reach: tuple[int, int]) -> None:
    recording = Recording(TARGET, 1)
    for all_until in reach:
        chosen = recording.empty((1, 16), torch.int64)
        recording.launch(Shape(STORE, 1, 32, numbers={"slots": 16}), **store_arguments(recording))
        recording.serve_choice(None)
        recording.choose(chosen, all_until)
        assert recording.leave_choice_out(chosen)
    assert recording.dense_until == 60
    for item in recording.items:
        assert isinstance(item, Launch)
        assert item.shape_for(1, dense=False) is not None
        assert item.shape_for(1, dense=True) is None


def test_a_choice_stays_where_nobody_made_it_or_it_is_wanted_or_served_by_another_item() -> None:
    for traced, made, changed in ((False, False, False), (True, True, False), (False, True, True)):
        recording = Recording(TARGET, 1, traced=traced)
        chosen = recording.empty((1, 16), torch.int64)
        recording.launch(Shape(STORE, 1, 32, numbers={"slots": 16}), **store_arguments(recording))
        recording.serve_choice(None)
        if made:
            recording.choose(chosen, 100)
        if changed:
            recording.restore([Call(print, [])])
        items = list(recording.items)
        assert not recording.leave_choice_out(chosen)
        assert (recording.items, recording.dense_until) == (items, 0)


@pytest.mark.parametrize("changed", [0, 1])
def test_a_choice_stays_where_one_of_what_served_it_is_another_item(changed: int) -> None:
    recording = Recording(TARGET, 1)
    chosen = recording.empty((1, 16), torch.int64)
    for _ in range(2):
        recording.launch(Shape(STORE, 1, 32, numbers={"slots": 16}), **store_arguments(recording))
        recording.serve_choice(None)
    recording.choose(chosen, 100)
    items = list(recording.items)
    items[changed] = Call(print, [])
    recording.restore(items)
    assert not recording.leave_choice_out(chosen)
    assert (recording.items, recording.dense_until) == (items, 0)


def test_sums_over_the_ranks_are_numbered() -> None:
    recording = Recording(TARGET, 1)
    assert [recording.next_exchange() for _ in range(3)] == [0, 1, 2]
    assert recording.exchanges == 3


def test_steps_are_begun_where_there_are_other_ranks() -> None:
    alone = Recording(TARGET, 1)
    assert (alone.begin_step(), alone.steps_begun) == (None, 0)
    peers: Any = SimpleNamespace(step_4=torch.zeros(4, dtype=torch.int32))
    recording = Recording(TARGET, 1, peers=peers)
    assert [recording.begin_step() is peers.step_4 for _ in range(2)] == [True, True]
    assert recording.steps_begun == 2


def test_items_part_where_the_ranks_meet_too() -> None:
    recording = Recording(TARGET, 1)
    for before in (recording.send, recording.meet, recording.receive):
        recording.call(print)
        before()
    recording.send()
    recording.call(print)
    recording.meet()
    recording.receive()
    recording.call(print)
    assert recording.end_part() == [(2, True), (3, False), (4, False), (4, True)]
    assert recording.end_part() == []


def test_items_part_once_between_words_that_go_and_words_that_come() -> None:
    """What else reads the same words belongs to what read them first; a new part is parted
    already.
    """
    recording = Recording(TARGET, 1)

    def note(before: Callable[[], None]) -> None:
        before()
        recording.call(lambda _: None)

    for before in (recording.send, recording.receive, recording.receive, recording.send):
        note(before)
    assert recording.end_part() == [(1, False)]
    note(recording.receive)
    assert recording.end_part() == []


def test_grids_have_three_sizes() -> None:
    assert Shape(STORE, 7, 32).grid == (7, 1, 1)
    assert Shape(STORE, (7, 2), 32).grid == (7, 2, 1)
    assert Shape(STORE, (7, 2, 3), 32).grid == (7, 2, 3)
    assert (ceil_div(9, 4), ceil_div(8, 4), round_up(9, 4), round_up(8, 4)) == (3, 2, 12, 8)


def test_targets_are_what_is_compiled_for() -> None:
    found = {compile_target(major, minor) for major, minor in ((9, 0), (10, 0), (10, 3))}
    assert found == set(ARCHITECTURES)
    for major, minor in ((8, 0), (8, 9), (12, 0)):
        assert compile_target(major, minor) is None
