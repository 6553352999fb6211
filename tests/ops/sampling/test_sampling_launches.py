"""What the sampling launcher records."""

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.sampling.cuda import sample_token
from tests.ops.recorded import HOPPER, TARGETS, functions, launches, meta

F32 = torch.float32
I64 = torch.int64
SETTINGS = meta(4, dtype=F32)
ONE = meta(1, dtype=I64)


def record(logits_V: Tensor, target: Target = HOPPER) -> list[Launch]:
    return launches(sample_token, logits_V, SETTINGS, ONE, ONE, tokens=1, target=target)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(
    ("vocabulary", "values"), [(1, 4), (1000, 4), (32_769, 8), (129_280, 16), (196_608, 24)]
)
def test_one_cluster_chooses_with_room_for_top_p(
    vocabulary: int, values: int, target: Target
) -> None:
    """The same launch for every sampler: what differs is read on the device."""
    found = record(meta(vocabulary, dtype=F32), target)
    assert functions(found) == ["sample_token"]
    shape = found[0].shape
    defines = dict(shape.kernel.defines)
    assert (shape.grid, shape.threads, shape.cluster) == ((8, 1, 1), 1024, 8)
    assert shape.shared_bytes == defines["SHARED_BYTES"] == 2 * 4 * values * 1024
    assert (defines["VALUES"], defines["VECTOR"]) == (values, int(vocabulary % 4 == 0))
    assert found[0].shape_of is None


def test_misaligned_logits_are_read_one_by_one() -> None:
    logits_V = meta(1001, dtype=F32)[1:]
    assert dict(record(logits_V)[0].shape.kernel.defines)["VECTOR"] == 0


def test_the_token_is_a_scalar_in_a_prefill_recording_too() -> None:
    recording = Recording(HOPPER, 512)
    token = sample_token(recording, meta(1, 129_280, dtype=F32)[0], SETTINGS, ONE, ONE)
    assert (token.shape, token.dtype, recording.owns(token)) == ((), I64, True)


def test_refuses_what_it_cannot_compute() -> None:
    for shape in ((2, 8), (0,), (196_609,)):
        with pytest.raises(ValueError, match=r"logits_V: found .*, expected .V. with V from 1 to"):
            record(meta(*shape, dtype=F32))
    with pytest.raises(ValueError, match=r"logits_V: found torch\.bfloat16 .*, expected torch\.fl"):
        record(meta(8))
    logits_V = meta(8, dtype=F32)
    with pytest.raises(ValueError, match=r"settings_4: found .*, expected torch\.float32 \[4\]"):
        launches(sample_token, logits_V, ONE, ONE, ONE, tokens=1)
    with pytest.raises(ValueError, match=r"seed_1: found .*, expected torch\.int64 \[1\]"):
        launches(sample_token, logits_V, SETTINGS, ONE.int(), ONE, tokens=1)
    with pytest.raises(ValueError, match=r"sample_token: found a tensor on cpu, expected cuda:0"):
        launches(sample_token, logits_V, SETTINGS, ONE, torch.tensor([1]), tokens=1)
