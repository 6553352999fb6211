"""Which memory a launch may name: its device's, and what the device reaches."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from tests.launch.norms import NORM, normalise

SHAPE = Shape(NORM, 1, 32)


@pytest.fixture
def recording() -> Recording:
    return Recording(Target(torch.device("cuda", 0), "sm_90a", 132), 1)


def read(recording: Recording, x: Tensor) -> None:
    normalise(recording, x, recording.empty((1, 64), torch.bfloat16), SHAPE)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_tensor_elsewhere_is_refused(
    recording: Recording, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the first fake tensor of a device starts it.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with FakeTensorMode():
        x = torch.empty(1, 64, dtype=torch.bfloat16, device=device)
    message = f"rms_norm: found a tensor on {device}, expected cuda:0"
    with pytest.raises(ValueError, match=message):
        read(recording, x)
    assert recording.items == []


@pytest.mark.parametrize("what", ["reached", "pinned"])
def test_memory_elsewhere_that_the_device_reaches_is_taken(
    recording: Recording, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, other = (torch.zeros(1, 64, dtype=torch.bfloat16) for _ in range(2))
    if what == "reached":
        recording.reach(x)
    else:
        monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor is x)
    read(recording, x)
    assert len(recording.items) == 1
    with pytest.raises(ValueError, match="found a tensor on cpu"):
        read(recording, other)
