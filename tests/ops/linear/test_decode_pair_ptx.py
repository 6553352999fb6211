"""Two products as one launch, executed on the CPU: the bits of two launches, whatever the schedule,
launch after launch.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat
from tests.ops.cases import normal
from tests.ops.linear.meta import BF16, FP8, MXFP4, NVFP4
from tests.ops.linear.normal_weight import normal_weight
from tests.ops.linear.pairs import in_two_launches, output_projection
from tests.ptx.faults import Trap
from tests.ptx.nvrtc import SourceEdit, run_recorded, soon
from tests.ptx.schedule import SCHEDULES, Schedule

pytestmark = pytest.mark.slow

ARCHITECTURE = "sm_90a"
GROUPS = 2
# Columns and rows of a group, outputs: a stage for a warp, or more than its ring has.
SHORT, LONG = (192, 48, 40), (768, 512, 320)
FAULTS = {
    "words are taken before they have come": SourceEdit(
        "decode_pair.cu", "if (least != 0) return;", "return;"
    ),
    "nothing is cleared": SourceEdit("hand_over.cuh", "at < half_bytes;", "at < 0;"),
    "launches do not take the halves in turn": SourceEdit(
        "decode_pair.cu", "if (threadIdx.x == 0) launch.end();", ""
    ),
    "a column is its neighbour": SourceEdit(
        "decode_pair.cu", "above * to.global_scale", "value * to.global_scale"
    ),
}


class Projection:
    """Both products on memory of the CPU, as one launch and as two."""

    def __init__(
        self,
        first: QuantFormat,
        second: QuantFormat,
        tokens: int,
        blocks: int,
        front: int = 0,
        sizes: tuple[int, int, int] = SHORT,
    ) -> None:
        """``front``: multiprocessors that a launch in front has."""
        self.tokens = tokens
        self.columns, self.rows, self.outputs = sizes
        self.weights = (
            pack_weight(normal_weight(first, GROUPS * self.rows, self.columns)),
            pack_weight(normal_weight(second, self.outputs, GROUPS * self.rows)),
        )
        self.target = Target(torch.device("cpu"), ARCHITECTURE, blocks)
        recording = Recording(self.target, tokens)
        output_projection(recording, self.draw(0), *self.weights)
        (launch,) = recording.items
        assert isinstance(launch, Launch)
        late = {**launch.arguments, "late_from": blocks - front}
        self.launch = replace(launch, arguments=late)
        self.lasting = {
            name: torch.zeros(like.shape, dtype=torch.int32)
            for name, like in launch.arguments.items()
            if isinstance(like, Tensor) and name in ("words", "counter")
        }

    def run(
        self,
        seed: int,
        schedule: Schedule = SCHEDULES["random"],
        edit: SourceEdit | None = None,
        x_TGK: Tensor | None = None,
    ) -> list[Tensor]:
        """The results of one launch, in memory that was NaN before it."""
        found = self._results()
        tensors = {
            "x": self.draw(seed) if x_TGK is None else x_TGK,
            "y": found[0],
            "z": found[1],
            **self.lasting,
        }
        run_recorded(
            self.launch, ARCHITECTURE, tensors, self.tokens, schedule, resident=True, edit=edit
        )
        return found

    def in_two_launches(self, seed: int) -> list[Tensor]:
        recording = Recording(self.target, self.tokens)
        in_two_launches(recording, self.draw(seed), *self.weights)
        found = self._results()
        first, _, second = recording.items
        assert isinstance(first, Launch)
        assert isinstance(second, Launch)
        run_recorded(first, ARCHITECTURE, {"y": found[0]}, self.tokens)
        x = found[0].flatten(1)
        run_recorded(second, ARCHITECTURE, {"x": x, "y": found[1]}, self.tokens)
        return found

    def draw(self, seed: int) -> Tensor:
        return normal(self.tokens, GROUPS, self.columns, seed=seed).bfloat16()

    def _results(self) -> list[Tensor]:
        shapes = (self.tokens, GROUPS, self.rows), (self.tokens, self.outputs)
        return [torch.full(shape, torch.nan, dtype=torch.bfloat16) for shape in shapes]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(other).all()
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("first", "second", "tokens", "blocks", "front"),
    [
        (FP8, FP8, 1, 3, 0),
        (FP8, FP8, 1, 4, 2),
        (NVFP4, FP8, 2, 2, 1),
        (MXFP4, NVFP4, 1, 3, 3),
        (BF16, BF16, 2, 5, 0),
        (FP8, BF16, 1, 2, 1),
    ],
    ids=str,
)
def test_the_bits_are_those_of_two_launches(
    first: QuantFormat, second: QuantFormat, tokens: int, blocks: int, front: int
) -> None:
    projection = Projection(first, second, tokens, blocks, front)
    for seed in (1, 2, 3):
        found = projection.run(seed)
        assert_equal(found, projection.in_two_launches(seed))


def test_any_schedule() -> None:
    projection = Projection(FP8, FP8, 1, 3, front=1)
    expected = projection.in_two_launches(1)
    for schedule in SCHEDULES.values():
        assert_equal(projection.run(1, schedule), expected)


def test_nan_is_handed_over() -> None:
    projection = Projection(FP8, FP8, 2, 2)
    x_TGK = projection.draw(1)
    x_TGK[1, 0, 5] = torch.nan
    low_TGR, z_TN = projection.run(1, x_TGK=x_TGK)
    assert low_TGR[1, 0].isnan().all()
    assert z_TN[1].isnan().all()
    assert torch.isfinite(z_TN[0]).all()


RING_FAULTS = {
    "a stage is requested twice": SourceEdit("decode_products.cuh", "cursor.advance();\n", ""),
    "the second product begins where the ring does": SourceEdit(
        "decode_pair.cu", "next.multiply(ring,", "ring.slot = ring.first, next.multiply(ring,"
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", [None, *RING_FAULTS])
def test_rings_of_more_stages_than_they_hold(fault: str | None) -> None:
    projection = Projection(FP8, FP8, 1, 2, sizes=LONG)
    found = projection.run(1, edit=None if fault is None else RING_FAULTS[fault])
    expected = projection.in_two_launches(1)
    if fault is None:
        assert_equal(found, expected)
    else:
        assert not torch.equal(found[1], expected[1])


def assert_right_under(fault: str) -> None:
    projection = Projection(FP8, FP8, 1, 3)
    for seed, name in ((1, "random"), (2, "late"), (3, "priority random")):
        found = projection.run(seed, SCHEDULES[name], FAULTS[fault])
        assert_equal(found, projection.in_two_launches(seed))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    with pytest.raises((AssertionError, Trap)):
        assert_right_under(fault)


def test_a_wait_for_lost_words_has_an_end() -> None:
    """A trap. To the machine a wait without one is a deadlock."""
    lost = SourceEdit("hand_over.cuh", '"r"(~word)', '"r"(0)', soon("decode_pair.cu"))
    with pytest.raises(Trap):
        Projection(FP8, FP8, 1, 3).run(1, edit=lost)
