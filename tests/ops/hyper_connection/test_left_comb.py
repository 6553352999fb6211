"""Which launch computes comb of a decode step's seam."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.ops.hyper_connection import decode, prefill
from dsv4.ops.prepare_attention.decode import prepare_attention
from tests.ops.hyper_connection.meta import FLASH, arguments
from tests.ops.prepare_attention.cases import step
from tests.ops.recorded import HOPPER, functions


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


def enter(
    recording: Recording, leaves: bool = True, tokens: int = 2
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The seam in front of a sublayer: x, and post and comb."""
    module = decode if tokens <= 8 else prefill
    streams_TME, weights, norm_weight = arguments("hc_pre", tokens, *FLASH)
    weights = replace(weights, leaves=leaves)
    x_TE, *mixing = module.hc_pre(recording, streams_TME, weights, norm_weight)
    return x_TE, (mixing[0], mixing[1])


def leave(recording: Recording, mixing: tuple[Tensor, Tensor], tokens: int = 2) -> None:
    module = decode if tokens <= 8 else prefill
    y_TE, streams_TME, *_ = arguments("hc_post", tokens, *FLASH)
    module.hc_post(recording, y_TE, streams_TME, *mixing)


def kernels(recording: Recording) -> list[str]:
    return functions([item for item in recording.items if isinstance(item, Launch)])


def test_the_launch_before_attention_takes_it_along() -> None:
    recording = Recording(HOPPER, 2)
    _, (post_TM, comb_TMM) = enter(recording)
    recording.call(print)
    prepare_attention(recording, *step("csa", 0, 2).arguments())
    leave(recording, (post_TM, comb_TMM))
    assert kernels(recording) == ["hc_mix", "hc_finish", "prepare_attention", "hc_post"]
    _, finish, _, prepare, _ = recording.items
    assert isinstance(finish, Launch)
    assert isinstance(prepare, Launch)
    assert dict(finish.shape.kernel.defines)["LEAVES"] == 1
    assert dict(prepare.shape.kernel.defines)["STREAMS"] == FLASH[0]
    assert finish.arguments["post"] is post_TM
    assert prepare.arguments["unbalanced"] is finish.arguments["comb"]
    assert prepare.arguments["comb"] is comb_TMM
    assert prepare.arguments["iterations"] == finish.arguments["iterations"] == 20


def test_its_row_may_need_a_block_more() -> None:
    """7 queries and the window key are one block of 8 rows."""
    for leaves, blocks in ((False, 1), (True, 2)):
        recording = Recording(HOPPER, 3)
        enter(recording, leaves, 3)
        recording.call(print)
        prepare_attention(recording, *step("window", 0, 3, heads=7).arguments())
        prepare = recording.items[-1]
        assert isinstance(prepare, Launch)
        assert prepare.shape.grid == (blocks, 3, 1)


def test_what_nobody_takes_along_is_a_launch_of_its_own() -> None:
    """Here what attention's launch would read early is written right in front of it."""
    recording = Recording(HOPPER, 2)
    _, mixing = enter(recording)
    prepare_attention(recording, *step("window", 0, 2).arguments())
    leave(recording, mixing)
    expected = ["hc_mix", "hc_finish", "prepare_attention", "hc_balance", "hc_post"]
    assert kernels(recording) == expected
    prepare = recording.items[2]
    assert isinstance(prepare, Launch)
    assert dict(prepare.shape.kernel.defines)["STREAMS"] == 0
    assert prepare.arguments["unbalanced"] is None


def test_the_next_seam_does_not_read_early_what_that_launch_writes() -> None:
    recording = Recording(HOPPER, 2)
    _, mixing = enter(recording)
    y_TE, streams_TME, *_, weights, norm_weight = arguments("hc_seam", 2, *FLASH)
    decode.hc_seam(recording, y_TE, streams_TME, *mixing, weights, norm_weight)
    assert kernels(recording)[2:] == ["hc_balance", "hc_mix", "hc_finish"]
    mix = recording.items[3]
    assert isinstance(mix, Launch)
    assert "SETTLED" not in dict(mix.shape.kernel.defines)


@pytest.mark.parametrize(
    ("leaves", "tokens", "traced"), [(False, 2, False), (True, 9, False), (True, 2, True)]
)
def test_other_seams_leave_nothing(leaves: bool, tokens: int, traced: bool) -> None:
    """Those that need not, of prompts, and of steps whose values are shown at once."""
    recording = Recording(HOPPER, tokens, traced=traced)
    _, mixing = enter(recording, leaves, tokens)
    finish = recording.items[-1]
    assert isinstance(finish, Launch)
    assert recording.left() is None
    assert "LEAVES" not in dict(finish.shape.kernel.defines)
    assert finish.arguments["comb"] is mixing[1]
    leave(recording, mixing, tokens)
    assert kernels(recording)[-2:] == ["hc_finish", "hc_post"]


def test_a_head_has_nothing_to_leave() -> None:
    recording = Recording(HOPPER, 2)
    decode.hc_head(recording, *arguments("hc_head", 2, *FLASH))
    assert recording.left() is None
