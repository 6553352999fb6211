"""Steps in which torch ops take the place of kernels."""

from typing import Any, cast

import pytest

from dsv4.launch.items import Call
from dsv4.ops.tables import CUDA_TABLE, swap_ops
from dsv4.step.kernel_names import CALL
from tests.step.planned_model import compute_parts, geometry

SEAM = ["hc_mix", "hc_finish"]


@pytest.mark.parametrize(
    ("op", "part", "left"),
    [
        ("moe", "experts", [*SEAM, CALL]),
        ("sparse_attention", "attention", ["prepare_attention", CALL, "decode_pair"]),
        ("linear_rows", "projections", [*SEAM, CALL, CALL]),
    ],
)
def test_swapped_ops_are_calls(op: str, part: str, left: list[str]) -> None:
    planned = geometry("v4-flash", layers=4)
    plain = planned.record(1)
    swapped = planned.on(swap_ops(CUDA_TABLE, {op: "torch"})).record(1)
    for before, after in zip(compute_parts(plain), compute_parts(swapped), strict=True):
        if after.name == f"layer 1 {part}":
            assert swapped.launches(after) == left
        elif not after.name.endswith(part):
            assert swapped.launches(after) == plain.launches(before)
    gone = {kernel.function for kernel, _ in plain.kernels()} - {
        kernel.function for kernel, _ in swapped.kernels()
    }
    assert gone == {"moe": {"moe_decode"}, "sparse_attention": {"attention_decode"}}.get(op, set())
    for recording in swapped.recordings.values():
        for item in recording.items:
            assert not isinstance(item, Call) or all(tensor.is_meta for tensor in item.tensors)


def test_swapped_ops_serve_one_length() -> None:
    swapped = swap_ops(CUDA_TABLE, {"moe": "torch"})
    assert cast(Any, swapped).exact
    assert not CUDA_TABLE.exact
    step = geometry("v4-flash", layers=4).on(swapped).record(100)
    experts = next(part for part in compute_parts(step) if part.name == "layer 3 experts")
    assert step.launches(experts) == ["hc_mix_many", "hc_finish", CALL]


def test_one_device_multiplies_the_head_whose_product_may_be_swapped() -> None:
    """Devices that share it have a product of their own, which no torch op replaces."""
    planned = geometry("v4-flash", layers=4, gpus=2)
    assert planned.shares
    for op, left in (("moe", "decode_linear"), ("vocab_parallel_linear", CALL)):
        step = planned.on(swap_ops(CUDA_TABLE, {op: "torch"})).record(1)
        (head,) = [part for part in compute_parts(step) if part.name == "head"]
        assert step.launches(head) == [*SEAM, left]
        logits_TV = step.outputs.logits_TV
        assert logits_TV is not None
        assert step.recordings[step.head].owns(logits_TV)
