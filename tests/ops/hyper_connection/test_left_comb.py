"""Which launch computes comb of a decode step's seam."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dsv4.launch.items import Item, Launch
from dsv4.launch.recording import Recording
from dsv4.ops.hyper_connection import decode, prefill
from dsv4.ops.prepare_attention.decode import prepare_attention
from tests.ops.bench_launches import bench_recordings
from tests.ops.hyper_connection.meta import FLASH, arguments
from tests.ops.prepare_attention.cases import step
from tests.ops.recorded import HOPPER, functions

Behind = Callable[[Recording, tuple[Tensor, Tensor]], None]


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


def enter(recording: Recording, tokens: int = 2) -> tuple[Tensor, Tensor]:
    """The seam in front of a sublayer: post and comb."""
    module = decode if tokens <= 8 else prefill
    _, *mixing = module.hc_pre(recording, *arguments("hc_pre", tokens, *FLASH))
    return mixing[0], mixing[1]


def leave(recording: Recording, mixing: tuple[Tensor, Tensor], tokens: int = 2) -> None:
    module = decode if tokens <= 8 else prefill
    y_TE, streams_TME, *_ = arguments("hc_post", tokens, *FLASH)
    module.hc_post(recording, y_TE, streams_TME, *mixing)


def go_on(recording: Recording, mixing: tuple[Tensor, Tensor], tokens: int = 2) -> None:
    """The seam behind the sublayer."""
    y_TE, streams_TME, *_, weights, norm_weight = arguments("hc_seam", tokens, *FLASH)
    decode.hc_seam(recording, y_TE, streams_TME, *mixing, weights, norm_weight)


def kernels(recording: Recording) -> list[str]:
    return functions([item for item in recording.items if isinstance(item, Launch)])


def assert_makes_it(item: Item, finish: Item) -> None:
    """A kernel that mixes gets what ``finish`` has written in the place of comb."""
    assert isinstance(finish, Launch)
    assert isinstance(item, Launch)
    assert dict(finish.shape.kernel.defines)["LEAVES"] == 1
    assert dict(item.shape.kernel.defines)["LEFT"] == 1
    for name in ("comb", "hc_eps", "iterations"):
        assert item.arguments[name] is finish.arguments[name]


def test_the_launch_before_attention_takes_it_along() -> None:
    recording = Recording(HOPPER, 2)
    post_TM, comb_TMM = enter(recording)
    recording.call(print)
    prepare_attention(recording, *step("csa", 0, 2).arguments())
    leave(recording, (post_TM, comb_TMM))
    assert kernels(recording) == ["hc_mix", "hc_finish", "prepare_attention", "hc_post"]
    _, finish, _, prepare, post = recording.items
    assert isinstance(finish, Launch)
    assert isinstance(prepare, Launch)
    assert dict(finish.shape.kernel.defines)["LEAVES"] == 1
    assert dict(prepare.shape.kernel.defines)["STREAMS"] == FLASH[0]
    assert finish.arguments["post"] is post_TM
    assert prepare.arguments["unbalanced"] is finish.arguments["comb"]
    assert prepare.arguments["comb"] is comb_TMM
    assert prepare.arguments["iterations"] == finish.arguments["iterations"] == 20
    assert isinstance(post, Launch)
    assert post.arguments["comb"] is comb_TMM
    assert "LEFT" not in dict(post.shape.kernel.defines)


def test_its_row_may_need_a_block_more() -> None:
    """7 queries and the window key are one block of 8 rows."""
    for traced, blocks in ((True, 1), (False, 2)):
        recording = Recording(HOPPER, 3, traced=traced)
        enter(recording, 3)
        recording.call(print)
        prepare_attention(recording, *step("window", 0, 3, heads=7).arguments())
        prepare = recording.items[-1]
        assert isinstance(prepare, Launch)
        assert prepare.shape.grid == (blocks, 3, 1)


def test_what_attention_cannot_take_along_the_mix_makes_for_itself() -> None:
    """Here what attention's launch would read early is written right in front of it."""
    recording = Recording(HOPPER, 2)
    mixing = enter(recording)
    prepare_attention(recording, *step("window", 0, 2).arguments())
    leave(recording, mixing)
    assert kernels(recording) == ["hc_mix", "hc_finish", "prepare_attention", "hc_post"]
    _, finish, prepare, post = recording.items
    assert isinstance(prepare, Launch)
    assert dict(prepare.shape.kernel.defines)["STREAMS"] == 0
    assert prepare.arguments["unbalanced"] is None
    assert_makes_it(post, finish)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("behind", "expected"), [(leave, ["hc_post"]), (go_on, ["hc_mix", "hc_finish"])]
)
def test_the_kernel_that_mixes_by_it_makes_it_for_itself(
    behind: Behind, expected: list[str], early: bool
) -> None:
    """In front of its wait where something is between the two seams."""
    recording = Recording(HOPPER, 2)
    mixing = enter(recording)
    finish = recording.items[-1]
    if early:
        recording.call(print)
    behind(recording, mixing)
    assert kernels(recording)[2:] == expected
    mix = recording.items[-len(expected)]
    assert_makes_it(mix, finish)
    assert isinstance(mix, Launch)
    assert dict(mix.shape.kernel.defines).get("SETTLED", 0) == early


@pytest.mark.parametrize("behind", [leave, go_on])
def test_for_an_op_of_torch_a_launch_of_its_own_makes_it(behind: Behind) -> None:
    recording = Recording(HOPPER, 2)
    mixing = enter(recording)
    recording.call(print, mixing[1])
    assert kernels(recording) == ["hc_mix", "hc_finish", "hc_balance"]
    behind(recording, mixing)
    mix = recording.items[4]
    assert isinstance(mix, Launch)
    assert mix.arguments["comb"] is mixing[1]
    assert "LEFT" not in dict(mix.shape.kernel.defines)


def test_who_mixes_by_another_comb_gets_that_one() -> None:
    recording = Recording(HOPPER, 2)
    post_TM, _ = enter(recording)
    other_TMM = arguments("hc_post", 2, *FLASH)[3]
    leave(recording, (post_TM, other_TMM))
    post = recording.items[-1]
    assert isinstance(post, Launch)
    assert post.arguments["comb"] is other_TMM
    assert "LEFT" not in dict(post.shape.kernel.defines)


@pytest.mark.parametrize(("tokens", "traced"), [(9, False), (2, True)])
def test_other_seams_leave_nothing(tokens: int, traced: bool) -> None:
    """Those of prompts, and of steps whose values are shown at once."""
    recording = Recording(HOPPER, tokens, traced=traced)
    mixing = enter(recording, tokens)
    finish = recording.items[-1]
    assert isinstance(finish, Launch)
    assert recording.left() is None
    assert "LEAVES" not in dict(finish.shape.kernel.defines)
    assert finish.arguments["comb"] is mixing[1]
    leave(recording, mixing, tokens)
    assert kernels(recording)[-2:] == ["hc_finish", "hc_post"]


def test_the_benchmark_times_no_launch_that_a_step_does_not_have() -> None:
    for op in ("hc_pre", "hc_seam"):
        for name, (recording,) in bench_recordings(HOPPER, op).items():
            mix = "hc_mix_many" if int(name.split()[1].replace(",", "")) > 8 else "hc_mix"
            assert kernels(recording) == [mix, "hc_finish"], name


def test_a_head_has_nothing_to_leave() -> None:
    recording = Recording(HOPPER, 2)
    decode.hc_head(recording, *arguments("hc_head", 2, *FLASH))
    assert recording.left() is None
