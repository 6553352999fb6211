"""What a kernel may read before it waits: what a recording holds to be complete by then."""

import re

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from tests.ops.sass import disassemble
from tests.step.planned_model import PlannedModel, demo, geometry

TARGET = Target(torch.device("cuda", 0), "sm_90a", 132)
POSITIONS = Kernel("opening/opening", "next_positions")
NORM = Kernel("norm/rms_norm", "rms_norm")
MODELS = {
    "flash": lambda: geometry("v4-flash", layers=4),
    "pro": lambda: geometry("v4-pro", layers=4),
    "demo": lambda: demo(1),
}


@pytest.fixture
def recording() -> Recording:
    return Recording(TARGET, 1)


def write(recording: Recording, positions_1: Tensor, settles: bool = False) -> None:
    """A launch that writes ``positions_1`` and counters of its own."""
    counters = [recording.empty((1,), torch.int64) for _ in range(2)]
    shape = Shape(POSITIONS, 1, 32, numbers={"tokens": 1}, settles=settles)
    recording.launch(shape, position=counters[0], rejected=counters[1], positions=positions_1)


def pass_by(
    recording: Recording, settles: bool, dense: bool = True, read: Tensor | None = None
) -> None:
    """A launch that writes a buffer of its own. ``dense``: it is there in dense steps too."""
    x, y = (recording.empty((1, 64), torch.bfloat16) for _ in range(2))
    shape = Shape(NORM, 1, 32, settles=settles)
    recording.launch(shape, x=x if read is None else read, weight=None, y=y, width=64, eps=1e-6)
    if not dense:
        recording.serve_choice(None)
        chosen = recording.empty((1,), torch.int64)
        recording.choose(chosen, 1)
        assert recording.leave_choice_out(chosen)


def test_what_no_item_writes_is_settled(recording: Recording) -> None:
    pass_by(recording, settles=False)
    assert recording.is_settled(torch.empty(1, device="meta"), recording.empty((1,), torch.int64))


def test_writes_settle_behind_a_later_item_that_waits_before_it_lets_the_next_one_start(
    recording: Recording,
) -> None:
    positions_1 = recording.empty((1,), torch.int64)
    other_1 = recording.empty((1,), torch.int64)
    write(recording, positions_1, settles=True)
    assert not recording.is_settled(positions_1)
    pass_by(recording, settles=False)
    assert not recording.is_settled(positions_1)
    pass_by(recording, settles=True)
    assert recording.is_settled(positions_1)
    write(recording, other_1)
    assert recording.is_settled(positions_1)
    assert not recording.is_settled(positions_1, other_1)
    write(recording, positions_1)
    assert not recording.is_settled(positions_1[:1])


def test_a_launch_that_dense_steps_do_not_have_settles_nothing(recording: Recording) -> None:
    positions_1 = recording.empty((1,), torch.int64)
    write(recording, positions_1)
    pass_by(recording, settles=True, dense=False)
    assert not recording.is_settled(positions_1)


@pytest.mark.parametrize("settling", [(True, False), (False, True), (True, True)])
def test_a_launch_settles_if_it_does_in_dense_steps_and_in_others(
    recording: Recording, settling: tuple[bool, bool]
) -> None:
    """Also where somebody has asked before it was known what dense steps have."""
    positions_1 = recording.empty((1,), torch.int64)
    write(recording, positions_1)
    pass_by(recording, settles=settling[0])
    assert recording.is_settled(positions_1) == settling[0]
    recording.serve_choice(Shape(NORM, 1, 64, settles=settling[1]))
    recording.choose(positions_1, 1)
    assert recording.leave_choice_out(positions_1)
    assert recording.is_settled(positions_1) == all(settling)


def test_reading_unsettles_nothing_and_calls_settle_all(recording: Recording) -> None:
    x_TE = recording.empty((1, 64), torch.bfloat16)
    pass_by(recording, settles=False, read=x_TE)
    assert recording.is_settled(x_TE)
    positions_1 = recording.empty((1,), torch.int64)
    write(recording, positions_1)
    recording.call(lambda tokens, positions: positions.zero_(), positions_1)
    assert recording.is_settled(positions_1)


def test_a_kernel_gets_no_argument_early_that_the_one_in_front_writes(
    recording: Recording,
) -> None:
    orders_TS = recording.empty((1, 4096), torch.int32)
    positions_T = recording.empty((1,), torch.int64)
    arguments = {
        "orders": orders_TS,
        "out": recording.empty((1, 512), torch.int64),
        "slots": 4096,
        "stride": 4096,
        "selected": 512,
        "peers": None,
        "first_token": 0,
    }
    shape = Shape(Kernel("indexer/top_k", "top_k_tokens"), 1, 512)
    recording.launch(shape, positions=positions_T, **arguments)
    write(recording, positions_T)
    with pytest.raises(
        ValueError, match="top_k_tokens: found an argument that the kernels in front"
    ):
        recording.launch(shape, positions=positions_T, **arguments)
    assert len(recording.items) == 2


def test_items_that_are_gone_settle_nothing(recording: Recording) -> None:
    positions_1 = recording.empty((1,), torch.int64)
    write(recording, positions_1)
    pass_by(recording, settles=True)
    assert recording.is_settled(positions_1)
    recording.restore(recording.items[:1])
    assert not recording.is_settled(positions_1)
    recording.restore([])
    assert recording.is_settled(positions_1)
    assert recording.items == []


def test_a_long_step_is_recorded_without_a_look_at_all_its_items_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """43 layers of Flash once took seconds: only the first seam of a prefill step settles."""
    looks = 0
    settles = Launch.settles.fget
    assert settles is not None

    def counted(launch: Launch) -> bool:
        nonlocal looks
        looks += 1
        return settles(launch)

    monkeypatch.setattr(Launch, "settles", property(counted))
    items = launches(MODELS["flash"](), 300)
    assert len(items) > 100
    assert 0 < looks < 2 * len(items)


def launches(planned: PlannedModel, tokens: int) -> list[Launch]:
    step = planned.record(tokens)
    return [
        item
        for recording in step.recordings.values()
        for item in recording.items
        if isinstance(item, Launch)
    ]


@pytest.mark.parametrize("model", MODELS)
def test_every_seam_of_a_decode_step_has_its_streams_early(model: str) -> None:
    """All but y: the experts, or attention, have settled them."""
    for tokens in (1, 3, 8):
        mixes = [
            dict(item.shape.kernel.defines)
            for item in launches(MODELS[model](), tokens)
            if item.shape.kernel.function == "hc_mix"
        ]
        assert len(mixes) > 4
        assert all(defines.get("SETTLED", 0) == defines["POST"] for defines in mixes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "tokens"), [("flash", 1), ("flash", 8), ("flash", 300), ("pro", 1), ("demo", 8)]
)
def test_kernels_that_settle_let_the_next_one_start_behind_their_wait_alone(
    model: str, tokens: int
) -> None:
    kernels = {
        shape.kernel
        for item in launches(MODELS[model](), tokens)
        for shape in (item.shape, item.dense_shape)
        if shape is not None and shape.settles
    }
    assert {kernel.function for kernel in kernels} >= {"embed"}
    for kernel in kernels:
        order = [name for name in order_of(kernel) if name != "LDGSTS"]
        assert "PREEXIT" in order, kernel
        before = ["", *order]
        starts = [one for one, name in zip(before, order, strict=False) if name == "PREEXIT"]
        assert set(starts) == {"ACQBULK"}, kernel


def test_rows_are_asked_for_before_the_wait() -> None:
    """Those of earlier steps, in a dense step and where there is no list at all."""
    kernels = {
        shape.kernel
        for item in launches(MODELS["flash"](), 1)
        for shape in (item.shape, item.dense_shape)
        if shape is not None and shape.kernel.function == "attention_decode"
    }
    for kernel in kernels:
        order = order_of(kernel)
        *_, last_wait = (at for at, name in enumerate(order) if name == "ACQBULK")
        early = order[:last_wait].count("LDGSTS")
        assert (early > 0) == (dict(kernel.defines)["LISTED"] == 0), kernel


def order_of(kernel: Kernel) -> list[str]:
    """The instructions of a kernel that this is about, in the order of its code."""
    sass = disassemble(kernel.source, TARGET.architecture, kernel.defines)
    start = sass.index(f".text.{kernel.function}")
    stop = sass.find("//--------------------- .text.", start)
    return re.findall(r"\b(ACQBULK|PREEXIT|LDGSTS)\b", sass[start : None if stop < 0 else stop])
