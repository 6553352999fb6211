"""What the launchers of hyper-connections record."""

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.kernel import Shape
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.hyper_connection import decode, prefill
from tests.ops.cases import EPS, HC_EPS
from tests.ops.hyper_connection.meta import F32, FLASH, PRO, arguments, record, seam_weights
from tests.ops.recorded import (
    HOPPER,
    TARGETS,
    assert_serves_shorter_chunks,
    functions,
    launches,
    meta,
    numbers,
    shape_at,
)

TINY = 4, 128
USUAL = {"flash": FLASH, "pro": PRO, "tiny": TINY, "two streams": (2, 1000)}
# More streams than the tensor cores' kernel takes, and rows that are not read 16 bytes at a time.
UNUSUAL = {"eight streams": (8, 192), "odd": (4, 36), "wide and odd": (3, 9001)}
SHAPES = {**USUAL, **UNUSUAL}
OPS = ("hc_pre", "hc_seam", "hc_head", "hc_post")


def at(launch: Launch, tokens: int) -> Shape:
    shape = shape_at(launch, tokens)
    assert isinstance(shape, Shape)
    return shape


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("op", OPS)
def test_kernels_of_a_decode_step(op: str, target: Target) -> None:
    expected = ["hc_post"] if op == "hc_post" else ["hc_mix", "hc_finish"]
    for shape in SHAPES.values():
        for tokens in range(1, 9):
            assert functions(record(op, tokens, shape, target)) == expected


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prefill_recording_serves_shorter_chunks(op: str, shape: str, target: Target) -> None:
    mix = "hc_mix_many" if shape in USUAL else "hc_mix"
    expected = ["hc_post"] if op == "hc_post" else [mix, "hc_finish"]
    for most in (512, 2048):
        assert functions(record(op, most, SHAPES[shape], target)) == expected
        assert_serves_shorter_chunks(lambda tokens: record(op, tokens, SHAPES[shape], target), most)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("most", [2, 8, 9, 16, 17, 300, 2048])
def test_partial_sums_of_every_chunk_have_room(most: int, target: Target) -> None:
    """``hc_finish`` is compiled for the splits that the mixing kernel writes."""
    for streams, width in SHAPES.values():
        mix, finish = record("hc_seam", most, (streams, width), target)
        partials = mix.arguments["partials"]
        assert isinstance(partials, Tensor)
        assert partials is finish.arguments["partials"]
        rows = (2 + streams) * streams + 1
        for tokens in range(9, most + 1) if most > 8 else (most,):
            mixed = at(mix, tokens)
            finished = at(finish, tokens)
            splits = dict(finished.kernel.defines)["SPLITS"]
            many = mixed.kernel.function == "hc_mix_many"
            assert mixed.grid[1 if many else 0] == splits
            assert tokens * splits * rows <= partials.numel()


def test_shapes_of_pro() -> None:
    """Four blocks share the columns of a decode step's token; in a long step it has one. Beside the
    warps with columns there are five, and one.
    """
    mix, finish = record("hc_seam", 1, PRO)
    assert (mix.shape.grid, mix.shape.threads) == ((112, 1, 1), 256)
    assert (finish.shape.grid, finish.shape.threads, finish.shape.cluster) == ((4, 1, 1), 384, 4)
    assert record("hc_seam", 8, PRO)[0].shape.grid == (112, 1, 1)
    mix, finish = record("hc_seam", 4096, PRO)
    assert (mix.shape.grid, mix.shape.shared_bytes) == ((256, 1, 1), 5 * 16384)
    assert (finish.shape.grid, finish.shape.threads, finish.shape.cluster) == ((1, 4096, 1), 480, 1)
    assert numbers(finish)["iterations"] == 20


@pytest.mark.parametrize("op", ["hc_pre", "hc_seam", "hc_head"])
def test_the_two_eps_are_not_exchanged(op: str) -> None:
    for tokens in (2, 300):
        found = numbers(record(op, tokens, FLASH)[-1])
        assert (found["norm_eps"], found["hc_eps"]) == (EPS, HC_EPS)


def test_what_comes_out_is_shaped_like_what_goes_in() -> None:
    for tokens, module in ((3, decode), (300, prefill)):
        recording = Recording(HOPPER, tokens)
        given = arguments("hc_seam", tokens, *FLASH)
        found = module.hc_seam(recording, *given)
        for out, like in zip(found, (given[1], given[0], *given[2:4]), strict=True):
            assert (out.shape, out.dtype, recording.owns(out)) == (like.shape, like.dtype, True)
        x_TE, post_TM, comb_TMM = module.hc_pre(recording, *arguments("hc_pre", tokens, *FLASH))
        assert (x_TE.dtype, x_TE.shape) == (torch.bfloat16, found[1].shape)
        assert (post_TM.shape, comb_TMM.shape) == (found[2].shape, found[3].shape)
        z_TE = module.hc_head(recording, *arguments("hc_head", tokens, *FLASH))
        assert (z_TE.dtype, z_TE.shape) == (torch.bfloat16, found[1].shape)


def test_misaligned_inputs_are_read_a_column_at_a_time() -> None:
    streams_TME = meta(2 * 4 * 64 + 1)[1:].view(2, 4, 64)
    weights = seam_weights(4, 64)
    norm_weight = meta(64, dtype=F32)
    mix, finish = launches(decode.hc_pre, streams_TME, weights, norm_weight, tokens=2)
    assert dict(mix.shape.kernel.defines)["COUNT"] == 1
    assert dict(finish.shape.kernel.defines)["COUNT"] == 1


@pytest.mark.parametrize(
    ("op", "at", "wrong", "message"),
    [
        (
            "hc_pre",
            0,
            meta(2, 4, 64, dtype=F32),
            r"streams_TME: found torch\.float32, expected torch\.bfloat16",
        ),
        (
            "hc_pre",
            0,
            meta(2, 9, 64),
            r"streams_TME: found \[2, 9, 64\], expected \[T, 1 to 8, E\]",
        ),
        ("hc_pre", 0, meta(2, 64, 4).mT, "streams_TME: found strides .*, expected"),
        ("hc_pre", 2, meta(32, dtype=F32), r"norm_weight: found .*\[32\], expected .*\[64\]"),
        ("hc_head", 2, meta(64), r"norm_weight: found torch\.bfloat16 .*, expected torch\.float32"),
        ("hc_post", 0, meta(1, 64), r"y_TE: found torch\.bfloat16 \[1, 64\], expected"),
        ("hc_seam", 3, meta(2, 4, 5, dtype=F32), "comb_TMM: found"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused(
    op: str, at: int, wrong: Tensor, message: str
) -> None:
    for module in (decode, prefill):
        given = list(arguments(op, 2, 4, 64))
        given[at] = wrong
        with pytest.raises(ValueError, match=message):
            getattr(module, op)(Recording(HOPPER, 2), *given)
