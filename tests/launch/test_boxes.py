"""What TMA can copy box by box, and what cannot be a box."""

import pytest
import torch
from torch import Tensor

from dsv4.launch import program
from dsv4.launch.boxes import Boxes
from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.signature import Parameter
from dsv4.launch.target import Target
from dsv4.launch.workspace import lay_out
from dsv4.ops.linear.prefill_long import linear
from dsv4.weights.packed import pack_weight
from dsv4.weights.quant import QuantTensor
from tests.launch.fake_driver import Driver

TENSOR = torch.empty(10, 3, 64, dtype=torch.bfloat16)
BOX = (8, 1, 64)
# Its slices, and not its rows, begin in the middle of 16 bytes.
UNEVEN = torch.empty(10 * 196, dtype=torch.bfloat16).as_strided((10, 3, 64), (196, 64, 1))


@pytest.mark.parametrize(
    ("tensor", "box", "swizzled", "message"),
    [
        (TENSOR.float(), BOX, False, "found torch.float32 of strides"),
        (TENSOR.transpose(0, 2), BOX, False, "whose last dimension is contiguous"),
        (UNEVEN, BOX, False, "expected multiples of 16 bytes"),
        (TENSOR, (8, 64), False, r"found a box of \(8, 64\) for \(10, 3, 64\)"),
        (TENSOR, (257, 1, 64), False, "expected 1 to 256 values"),
        (TENSOR, (0, 1, 64), False, "expected 1 to 256 values"),
        (TENSOR, (8, 1, 4), False, "found rows of 8 bytes"),
        (TENSOR, (8, 1, 128), True, "found rows of 256 bytes"),
        (torch.empty(2, 1, 1, 1, 1, 8).bfloat16(), (1, 1, 1, 1, 1, 8), False, "at most 5 dim"),
    ],
)
def test_what_tma_cannot_copy_is_refused(
    tensor: Tensor, box: tuple[int, ...], swizzled: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^boxes: .*{message}"):
        Boxes(tensor, box, swizzled)


@pytest.mark.parametrize(
    ("tensor", "box", "swizzled"),
    [
        (TENSOR, (256, 1, 64), True),
        (torch.empty(2, 1, 1, 3, 8).bfloat16(), (1, 1, 1, 1, 8), False),
        (torch.empty(2, 8, dtype=torch.int32), (1, 4), False),
        (torch.empty(2, 256).bfloat16(), (1, 256), False),
    ],
)
def test_the_largest_and_the_smallest_of_what_tma_copies_is_taken(
    tensor: Tensor, box: tuple[int, ...], swizzled: bool
) -> None:
    assert Boxes(tensor, box, swizzled).box == box


def test_rows_of_boxes_are_measured_in_the_bytes_of_their_values() -> None:
    words = torch.empty(2, 64, dtype=torch.int32)
    with pytest.raises(ValueError, match="found rows of 8 bytes"):
        Boxes(words, (1, 2))
    with pytest.raises(ValueError, match="found rows of 256 bytes"):
        Boxes(words, (1, 64), swizzled=True)


def test_a_parameter_takes_boxes_or_something_else() -> None:
    boxes = Boxes(TENSOR, BOX, swizzled=True)
    parameter = Parameter("x", "TensorMap", pointer=False)
    assert parameter.problem(boxes) is None
    assert parameter.problem(TENSOR) is not None
    assert Parameter("x", "bf16", pointer=True).problem(boxes) is not None
    assert Parameter("x", "int", pointer=False).problem(boxes) is not None


def recorded_product() -> Recording:
    """A product of 300 tokens behind a call that makes x."""
    recording = Recording(Target(torch.device("cpu"), "sm_90a", 132), 300)
    weight = pack_weight(QuantTensor.dense(torch.zeros(64, 64).bfloat16()))
    x = recording.empty((300, 64), torch.bfloat16)
    recording.call(lambda *_: None, x)
    linear(recording, x, weight)
    return recording


def test_a_buffer_is_alive_where_its_boxes_are_read() -> None:
    """Else another one would get its memory. The launch for fewer tokens, which names y and what
    the boxes are of, is left out.
    """
    recording = recorded_product()
    fill, _, launch = recording.items
    recording.restore([fill, launch])
    layout = lay_out(recording)
    x_at, y_at = sorted(layout.offsets.values())
    assert y_at - x_at >= 300 * 64 * 2


def test_boxes_are_encoded_once_for_the_memory_of_their_tensors(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stay where they are among the arguments when a step has another length."""
    encoded = []

    def encode(boxes: Boxes, address: int) -> bytes:
        encoded.append(boxes)
        return address.to_bytes(8, "little") * 16

    monkeypatch.setattr(program, "tensor_map", encode)
    recording = recorded_product()
    _, _, launch = recording.items
    assert isinstance(launch, Launch)
    running = program.Program(recording)
    for tokens in (300, 129, 300):
        running.run(tokens)
    assert encoded == [launch.arguments[name] for name in ("x", "weight", "weight_scale")]
    places = [running.tensor(boxes.tensor).data_ptr() for boxes in encoded]
    for launched, tokens in zip(driver.launches, (300, 129, 300), strict=True):
        maps = [place.to_bytes(8, "little") * 16 for place in places]
        assert launched.words[:3] == maps
        assert launched.words[6:] == [tokens, 64, 64, 4, 64, 1]
