"""No launch of a step asks for more than a multiprocessor or the driver gives."""

from collections.abc import Callable, Iterator

import pytest

from dsv4.engine_config import EngineConfig
from dsv4.launch.items import Launch
from dsv4.launch.kernel import Shape
from dsv4.step.recorded import RecordedStep
from tests.ops.recorded import limits_exceeded, shape_at
from tests.step.planned_model import PlannedModel, geometry

LONG = EngineConfig(prefill_chunk=4096, max_context=1 << 20)
PLANNED: dict[str, Callable[[], PlannedModel]] = {
    "flash": lambda: geometry("v4-flash", layers=4, engine=LONG),
    "flash, native": lambda: geometry("v4-flash", "native", layers=4, engine=LONG),
    "pro": lambda: geometry("v4-pro", layers=4, engine=LONG),
    "pro, all nvfp4": lambda: geometry("v4-pro", "nvfp4-all", layers=4, engine=LONG),
    "pro, bf16": lambda: geometry("v4-pro", "bf16", layers=4, engine=LONG),
}


def shapes(step: RecordedStep, tokens: int) -> Iterator[Shape]:
    """Every shape of a step, at its own length and at shorter ones that share it."""
    for length in {tokens, 9, 100, 513} if tokens > 8 else {tokens}:
        for recording in step.recordings.values():
            for item in recording.items:
                shape = shape_at(item, length) if isinstance(item, Launch) else None
                if isinstance(shape, Shape):
                    yield shape
                if isinstance(item, Launch) and item.dense_shape is not None:
                    yield item.dense_shape


@pytest.mark.parametrize("gpu", [("sm_90a", 132), ("sm_100a", 148), ("sm_103a", 160)], ids=str)
@pytest.mark.parametrize("name", PLANNED)
def test_launches_stay_within_the_limits_of_the_machine(name: str, gpu: tuple[str, int]) -> None:
    planned = PLANNED[name]().for_gpus(*gpu)
    for tokens in (1, 2, 4, 8, 513, 4096):
        for shape in shapes(planned.record(tokens), tokens):
            what = f"{shape.kernel.function} of {tokens} tokens"
            assert limits_exceeded(shape) == [], what
