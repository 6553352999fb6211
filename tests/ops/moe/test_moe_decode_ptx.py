"""The decode experts' launch, executed on the CPU with all of its blocks at once, under schedules
that hurry and hold up warps and copies as the ISA allows.
"""

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.moe import ExpertWeights, decode, moe
from dsv4.ops.router import Router
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize
from tests.ops.gpu import relative_error
from tests.ptx.faults import Fault, Trap
from tests.ptx.nvrtc import SourceEdit, run_recorded, soon
from tests.ptx.schedule import SCHEDULES, Schedule

pytestmark = pytest.mark.slow

ARCHITECTURE = "sm_90a"
BLOCKS = 3
LIMIT = 10.0
COUNT = 8
PER_TOKEN = 3
FP8 = QuantFormat.FP8_BLOCK128
# Hidden rows may round the other way after sums in another order.
BOUND = 4e-3
RESULTS = ("y_TE", "ids_TP", "weights_TP")
# Zero before the first launch, and as a launch leaves it afterwards.
LASTING = ("h", "counters", "sums")


class Layer:
    """Experts and a router on the CPU, and the launch of one step, to be run again and again."""

    def __init__(
        self, width: int, inner: int, tokens: int, routed: QuantFormat = QuantFormat.NVFP4
    ) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self._tokens = tokens
        self.experts = self._weights(routed, width, inner, COUNT)
        self.shared = self._weights(FP8, width, inner)
        gate = self._draw(COUNT, width) * width**-0.5
        router = pack_weight(QuantTensor.dense(gate.bfloat16()))
        self.router = Router(router, self._draw(COUNT), False, PER_TOKEN, 2.5)
        self.x_TE = torch.empty(tokens, width, dtype=torch.bfloat16)
        self.tokens_T = torch.zeros(tokens, dtype=torch.int64)
        recording = Recording(Target(torch.device("cpu"), ARCHITECTURE, BLOCKS), tokens)
        decode.moe(recording, *self.arguments)
        (launch,) = recording.items
        assert isinstance(launch, Launch)
        self._launch = launch
        self._lasting = {name: torch.zeros_like(like, device="cpu") for name, like in self._meta()}

    @property
    def hidden(self) -> Tensor:
        """Both halves of h."""
        return self._lasting["h"]

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Router, ExpertWeights, ExpertWeights, float]:
        return self.x_TE, self.tokens_T, self.router, self.experts, self.shared, LIMIT

    def draw(self) -> None:
        """Another input."""
        self.x_TE.copy_(self._draw(*self.x_TE.shape))

    def run(self, schedule: Schedule, edit: SourceEdit | None = None) -> list[Tensor]:
        """The results of one launch, in memory that was NaN before it."""
        tensors = dict(self._lasting)
        for name in RESULTS:
            argument = self._launch.arguments[name]
            assert isinstance(argument, Tensor)
            tensors[name] = torch.full(argument.shape, -1, dtype=argument.dtype)
        tensors["nan"] = torch.zeros(1, dtype=torch.int32)
        run_recorded(
            self._launch, ARCHITECTURE, tensors, self._tokens, schedule, resident=True, edit=edit
        )
        assert int(tensors["nan"]) == 0
        return [tensors[name] for name in RESULTS]

    def _meta(self) -> list[tuple[str, Tensor]]:
        found = [(name, self._launch.arguments[name]) for name in LASTING]
        return [(name, like) for name, like in found if isinstance(like, Tensor)]

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def _weights(self, format: QuantFormat, width: int, inner: int, *stack: int) -> ExpertWeights:
        shapes = ((inner, width), (width, inner), (inner, width))
        matrices = (self._draw(*stack, *shape) * shape[1] ** -0.5 for shape in shapes)
        return ExpertWeights(*(pack_weight(quantize(matrix, format)) for matrix in matrices))


def assert_right(layer: Layer, schedule: Schedule, edit: SourceEdit | None = None) -> None:
    """Of one launch with another input: the routes and sums of the torch op."""
    layer.draw()
    y_TE, ids_TP, weights_TP = layer.run(schedule, edit)
    right = moe(*layer.arguments)
    assert torch.equal(ids_TP, right.ids_TP), schedule.name
    assert torch.allclose(weights_TP, right.weights_TP, rtol=1e-4), schedule.name
    assert relative_error(y_TE, right.y_TE.double()) < BOUND, schedule.name


def test_launches_follow_each_other_under_any_schedule() -> None:
    """Each of them takes the half of h that the launch before it has cleared."""
    layer = Layer(256, 128, tokens=1)
    for schedule in SCHEDULES.values():
        assert_right(layer, schedule)


def test_tokens_share_experts() -> None:
    layer = Layer(256, 128, tokens=3)
    for name in ("late", "priority random"):
        assert_right(layer, SCHEDULES[name])


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_scales_of_32_columns(tokens: int) -> None:
    """Alone and in pairs a token has columns of the MMA for neighbouring blocks."""
    layer = Layer(256, 128, tokens, QuantFormat.MXFP4)
    assert_right(layer, SCHEDULES["random"])


def test_words_of_an_earlier_launch_would_be_taken_for_new_ones() -> None:
    """That is why a launch clears the half that it does not use."""
    layer = Layer(256, 128, tokens=1)
    assert_right(layer, SCHEDULES["random"])
    first = layer.hidden.clone()
    assert_right(layer, SCHEDULES["random"])
    half = layer.hidden.numel() // 2
    assert not layer.hidden[:half].any(), "cleared by the second launch"
    layer.hidden[:half] = first[:half]
    with pytest.raises(AssertionError):
        assert_right(layer, SCHEDULES["random"])


SHORT_BATCHES = SourceEdit("moe_down_line.cuh", "ROUNDS = TOKENS > 4 ? 2 : 4", "ROUNDS = 1")


def test_a_token_has_the_same_bits_in_steps_of_every_length() -> None:
    """Beside tokens of other experts, with parts of one and of two stages, with pairs of row tiles
    that blocks share, and in several batches.
    """
    rows = torch.randn(5, 128, generator=torch.Generator().manual_seed(5)).bfloat16()

    def run(first: int, last: int, edit: SourceEdit | None = None) -> list[Tensor]:
        layer = Layer(128, 320, last - first)
        layer.x_TE.copy_(rows[first:last])
        return layer.run(SCHEDULES["random"], edit)

    alone = {token: run(token, token + 1) for token in (0, 2)}
    for last, edit in ((2, None), (3, None), (5, None), (5, SHORT_BATCHES)):
        together = run(0, last, edit)
        for token in (token for token in alone if token < last):
            for found, expected in zip(together, alone[token], strict=True):
                assert torch.equal(found[token], expected[0]), (token, last)


LOST = {
    "scores": SourceEdit(
        "moe_scores.cuh",
        "numbered(launch, log_score",
        "numbered(launch - 1, log_score",
        soon("moe_scores.cuh"),
    ),
    "hidden rows": SourceEdit(
        "hand_over.cuh",
        '"r"(~first), "r"(~second)',
        '"r"(0), "r"(0)',
        soon("moe_decode.cu", soon("moe_hidden.cuh")),
    ),
    "sums": SourceEdit(
        "moe_down_line.cuh",
        "numbered(launch, sum)",
        "numbered(launch - 1, sum)",
        soon("moe_down_line.cuh"),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lost", LOST)
def test_a_wait_for_lost_words_has_an_end(lost: str) -> None:
    """A trap. To the machine a wait without one is a deadlock."""
    layer = Layer(256, 128, tokens=1)
    with pytest.raises(Trap):
        assert_right(layer, SCHEDULES["random"], LOST[lost])


PLANTED = {
    "blocks do not take turns": SourceEdit(
        "moe_products.cuh", "valid) && turn) ? zeros : address", "valid)) ? zeros : address"
    ),
    "one chain is lost": SourceEdit(
        "moe_products.cuh", "sum + __shfl_xor_sync(~0u, sum, 1)", "sum"
    ),
    "slices are not waited for": SourceEdit(
        "moe_hidden.cuh", "return __all_sync(~0u, least != 0);", "return true;"
    ),
    "nothing is cleared": SourceEdit("hand_over.cuh", "at < half_bytes;", "at < 0;"),
    "words are not complements": SourceEdit(
        "hand_over.cuh", '"r"(~first), "r"(~second)', '"r"(first), "r"(second)'
    ),
    "a launch does not count": SourceEdit(
        "moe_decode.cu", "if (threadIdx.x == 0) launch.end();", ""
    ),
    "sums of other blocks are not waited for": SourceEdit(
        "moe_down_line.cuh", "if (__all_sync(~0u, unsigned(word >> 32) == launch)) break;", "break;"
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str) -> None:
    """Within three launches of one of two schedules: wrong results, a fault, or a wait without an
    end.
    """
    found = False
    for schedule in ("late", "random"):
        layer = Layer(256, 128, tokens=1)
        try:
            for _ in range(3):
                assert_right(layer, SCHEDULES[schedule], PLANTED[name])
        except (AssertionError, Fault):
            found = True
            break
    assert found
