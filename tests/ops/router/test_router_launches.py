"""What the router's launcher records; a decode step routes in the launch of its experts."""

from dataclasses import replace

import pytest
import torch

from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.router.prefill import route
from tests.ops.moe.meta_layer import (
    FLASH,
    GEOMETRIES,
    Geometry,
    launches,
    names,
    step,
)
from tests.ops.recorded import HOPPER, TARGETS, meta

TOKENS = (9, 10, 100, 129, 511, 512)


def recorded(geometry: Geometry, target: Target, tokens: int) -> Recording:
    recording = Recording(target, tokens)
    ids_TP, weights_TP = route(recording, *step(recording, geometry), geometry.router())
    assert tuple(ids_TP.shape) == tuple(weights_TP.shape) == (tokens, geometry.per_token)
    assert (ids_TP.dtype, weights_TP.dtype) == (torch.int64, torch.float32)
    return recording


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_recording_serves_every_shorter_chunk(geometry: Geometry, target: Target) -> None:
    exact = {tokens: recorded(geometry, target, tokens) for tokens in TOKENS}
    for most in (512, 2048):
        recording = recorded(geometry, target, most)
        assert names(recording) == ["prefill_linear", "router_select"]
        for tokens, expected in exact.items():
            for launch, single in zip(launches(recording), launches(expected), strict=True):
                assert launch.shape_of is not None
                assert launch.shape_of(tokens) == single.shape


def test_logits_of_an_odd_number_of_experts_have_gaps_between_their_rows() -> None:
    _, select = launches(recorded(replace(FLASH, experts=37), HOPPER, 9))
    logits_TX = select.arguments["logits_TX"]
    assert isinstance(logits_TX, torch.Tensor)
    assert tuple(logits_TX.shape) == (9, 37)
    assert select.arguments["logits_stride"] == logits_TX.stride(0)


def test_what_a_kernel_cannot_read_is_refused() -> None:
    recording = Recording(HOPPER, 9)
    x_TE, tokens_T = step(recording, FLASH)
    learned = FLASH.router()
    hashed = replace(FLASH, hashed=True).router()
    for changed, message in (
        (replace(learned, experts_per_token=17), "experts_per_token: found 17, expected 1 to 16"),
        (replace(learned, selection=meta(5, dtype=torch.float32)), r"selection: found .* \[5\]"),
        (
            replace(hashed, selection=meta(1, 6, dtype=torch.int64).expand(9, 6)),
            "selection: .*strides",
        ),
        (replace(hashed, selection=meta(9, 6, dtype=torch.int32)), "selection: found torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            route(recording, x_TE, tokens_T, changed)
    with pytest.raises(ValueError, match="tokens_T: found torch.float32"):
        route(recording, x_TE, meta(9, dtype=torch.float32), hashed)
    with pytest.raises(ValueError, match=r"gate: found \[256, 4096\], expected .* 64"):
        route(recording, x_TE[:, :64], tokens_T, learned)
    assert recording.items == []
