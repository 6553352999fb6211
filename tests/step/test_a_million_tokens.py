"""What a context of 2^20 tokens makes of a step: no tensor that grows with the context or with the
chunk is beyond 32-bit offsets, and the work memory hardly grows.
"""

from collections.abc import Iterator
from typing import Literal

import pytest
from torch import Tensor

from dsv4.checkpoint import Geometry
from dsv4.engine_config import EngineConfig
from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Launch
from dsv4.launch.kernel import Shape
from dsv4.limits import MAX_PREFILL_CHUNK
from dsv4.ops.trees import tensors_in
from dsv4.step.recorded import RecordedStep
from tests.ops.recorded import limits_exceeded, shape_at
from tests.step.planned_model import GPUS, PlannedModel, geometry

MILLION = 1 << 20
# Every kind of layer, hashed ones included.
LAYERS = 5
# Pro's queries, of the longest chunk that there may be: the last byte has the offset 2^31 - 1.
MOST_BYTES = 1 << 31
KvDtype = Literal["fp8", "bf16"]
GEOMETRIES: tuple[Geometry, ...] = ("v4-flash", "v4-pro")


def planned(
    name: Geometry, chunk: int, context: int = MILLION, kv: KvDtype = "fp8"
) -> PlannedModel:
    engine = EngineConfig(prefill_chunk=chunk, max_context=context, kv_dtype=kv)
    return geometry(name, layers=LAYERS, engine=engine)


def launches(step: RecordedStep) -> Iterator[Launch]:
    for recording in step.recordings.values():
        for item in recording.items:
            assert isinstance(item, Launch)
            yield item


def growing(model: PlannedModel, step: RecordedStep) -> dict[str, Tensor]:
    """Every tensor that a launch gets and that is no weight, by kernel and argument: the largest
    buffer that goes by this name.
    """
    weights = {storage_key(tensor) for tensor in tensors_in(model.model)}
    found: dict[str, Tensor] = {}
    for launch in launches(step):
        for name, value in launch.arguments.items():
            if isinstance(value, Tensor) and storage_key(value) not in weights:
                key = f"{launch.shape.kernel.function} {name}"
                if key not in found or size(value) > size(found[key]):
                    found[key] = value
    return found


def size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("kv", ["fp8", "bf16"])
@pytest.mark.parametrize("chunk", [2048, 4096, MAX_PREFILL_CHUNK])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_offsets_into_caches_and_buffers_fit_32_bits(
    name: Geometry, chunk: int, kv: KvDtype
) -> None:
    """Scores of a whole chunk of 4,096 tokens would be 2^32 bytes."""
    model = planned(name, chunk, kv=kv)
    for tokens in (1, 8, chunk):
        found = growing(model, model.record(tokens))
        assert {key: size(value) for key, value in found.items() if size(value) > MOST_BYTES} == {}
        rows = {value.shape[:1] for value in found.values()}
        assert (MILLION // 4 + 1,) in rows, "the caches were not among them"


@pytest.mark.parametrize("chunk", [2048, 4096, MAX_PREFILL_CHUNK])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_launch_of_the_longest_context_is_one_that_the_driver_takes(
    name: Geometry, chunk: int
) -> None:
    model = planned(name, chunk)
    for tokens in (1, 2, 8, chunk):
        for launch in launches(model.record(tokens)):
            for length in {tokens, min(tokens, 9), tokens - tokens // 3}:
                shape = shape_at(launch, length)
                if isinstance(shape, Shape):
                    assert limits_exceeded(shape) == [], shape.kernel.function


@pytest.mark.parametrize("chunk", [2048, 4096])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_work_memory_at_a_million_is_bounded(name: Geometry, chunk: int) -> None:
    """Besides what a step takes at 8,192 tokens: 256 MiB of scores, a bfloat16 copy of the entries
    of one layer, and the lists of a chunk.
    """
    short, long = (
        planned(name, chunk, context).record(chunk).workspace_bytes()[GPUS[0]]
        for context in (8192, MILLION)
    )
    copied = 2 * 512 * (MILLION // 4 + 1)
    assert short < long <= short + (256 << 20) + copied
