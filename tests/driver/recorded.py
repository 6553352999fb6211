"""A small recorded step that needs no GPU: what it launches has no code."""

import torch

from dsv4.launch.items import Call, Launch
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.launch.signature import Signature
from dsv4.launch.target import Target
from dsv4.model import Outputs
from dsv4.step.parts import Part, Transfer
from dsv4.step.recorded import RecordedStep


def recorded_step(first: torch.device, second: torch.device) -> RecordedStep:
    """Two layers with a hand-off between them: launches, one of them only for two and more tokens,
    and a call.
    """
    recordings = {device: Recording(Target(device, "sm_90a", 132), 8) for device in (first, second)}
    recordings[first].items += [_launch("embed"), _launch("many", least=2), _launch("gemm")]
    recordings[second].items += [_launch("gemm"), Call(len, []), _launch("store")]
    parts = (
        Part("projections", first, 0, 0, 2),
        Part("mix", first, 0, 2, 3),
        Transfer(first, second, torch.zeros(8)),
        Part("experts", second, 1, 0, 1, drains=first),
        Part("head", second, None, 1, 2),
        Part("sample", second, None, 2, 3),
    )
    outputs = Outputs(torch.zeros(1), None)
    return RecordedStep(8, second, parts, recordings, outputs, (), None)


def _launch(name: str, least: int = 1) -> Launch:
    shape = Shape(Kernel("x/x", name), 1, 32)
    shape_of = lambda tokens: shape if tokens >= least else None  # noqa: E731
    return Launch(Signature(name, ()), shape, {}, shape_of, shape)
