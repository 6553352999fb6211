"""Hyper-connection and norm kernels compile for every target without spilling; no GPU needed."""

import re

import pytest

from dsv4.launch.items import Launch
from dsv4.launch.kernel import Kernel
from dsv4.launch.recording import Recording
from dsv4.launch.target import ARCHITECTURES
from dsv4.ops.hyper_connection import decode
from tests.ops.hyper_connection.meta import FLASH, PRO, arguments, record
from tests.ops.recorded import HOPPER
from tests.ops.sass import compile_once, count, disassemble, resources

EVERY_TARGET = ("norm", "seam", "pre", "head", "finish", "finish that leaves", "balance", "post")
NORM = {
    "norm": (("COUNT", 8), ("GROUPS", 1)),
    "norm of any width": (("COUNT", 1), ("GROUPS", 8)),
}
# Op, tokens, (M, E), and which of its launches.
LAUNCHES = {
    "seam": ("hc_seam", 1, PRO, 0),
    "seam of a narrow model": ("hc_seam", 1, FLASH, 0),
    "seam of several tokens": ("hc_seam", 8, PRO, 0),
    "pre": ("hc_pre", 1, PRO, 0),
    "head": ("hc_head", 1, PRO, 0),
    "seam of any width": ("hc_seam", 1, (4, 9001), 0),
    "eight streams": ("hc_seam", 1, (8, 512), 0),
    "eight streams of many tokens": ("hc_seam", 300, (8, 512), 0),
    "finish": ("hc_seam", 1, PRO, 1),
    "finish of the head": ("hc_head", 1, PRO, 1),
    "finish of many tokens": ("hc_seam", 4096, PRO, 1),
    "post": ("hc_post", 1, PRO, 0),
    "prefill seam": ("hc_seam", 4096, PRO, 0),
    "prefill pre": ("hc_pre", 4096, PRO, 0),
    "prefill head": ("hc_head", 4096, PRO, 0),
}
LEAVING = (
    "finish that leaves",
    "balance",
    "seam that balances",
    "seam that balances many tokens",
    "post that balances",
)
KERNELS = (*NORM, *LAUNCHES, *LEAVING)


def kernel(name: str) -> Kernel:
    if name in NORM:
        return Kernel("norm/rms_norm", "rms_norm", NORM[name])
    if name in LEAVING:
        return leaving(name, 8 if name.endswith("tokens") else 1)
    op, tokens, shape, launch = LAUNCHES[name]
    return record(op, tokens, shape)[launch].shape.kernel


def leaving(name: str, tokens: int) -> Kernel:
    """Of a seam whose comb is left, and of what makes it."""
    recording = Recording(HOPPER, tokens)
    _, post_TM, comb_TMM = decode.hc_pre(recording, *arguments("hc_pre", tokens, *FLASH))
    finish = recording.items[-1]
    left = recording.left()
    assert isinstance(finish, Launch)
    assert left is not None
    if name in ("finish that leaves", "balance"):
        return (left if name == "balance" else finish).shape.kernel
    y_TE, streams_TME, *_, weights, norm_weight = arguments("hc_seam", tokens, *FLASH)
    recording.call(print)
    if name == "post that balances":
        decode.hc_post(recording, y_TE, streams_TME, post_TM, comb_TMM)
    else:
        mixing = post_TM, comb_TMM
        decode.hc_seam(recording, y_TE, streams_TME, *mixing, weights, norm_weight)
    taker = recording.items[3]
    assert isinstance(taker, Launch)
    assert dict(taker.shape.kernel.defines)["LEFT"] == 1
    return taker.shape.kernel


def resources_of(name: str, architecture: str) -> dict[str, tuple[int, int]]:
    found = kernel(name)
    return resources(compile_once(found.source, architecture, found.defines).log)


def sass_of(name: str) -> str:
    found = kernel(name)
    return disassemble(found.source, "sm_90a", found.defines)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "prefill seam"])
def test_compiles_without_spills(name: str) -> None:
    for architecture in ARCHITECTURES if name in EVERY_TARGET else ARCHITECTURES[:1]:
        found = resources_of(name, architecture)
        assert found
        assert not any(spill for _, spill in found.values()), (architecture, found)


def test_the_prefill_seam_compiles_almost_without_spills() -> None:
    """All 128 registers are in use: some versions of the compiler spill a value or two."""
    for architecture in ARCHITECTURES:
        found = resources_of("prefill seam", architecture)
        assert max(spill for _, spill in found.values()) <= 32, architecture


def test_decode_weights_are_fetched_before_the_wait() -> None:
    """6 loads of 16 bytes per lane. What older kernels wrote comes before the wait too: 4 streams,
    post and comb.
    """
    before, _, after = sass_of("seam").partition("ACQBULK")
    assert len(re.findall(r"LDG\S*\.128\S*\.CONSTANT", before)) == 6
    assert not re.search(r"LDG\S*\.CONSTANT", after)
    assert count(before, "LDG.E") == 6 + 4 + 1 + 4


@pytest.mark.parametrize(
    "name", ["seam that balances", "seam that balances many tokens", "post that balances"]
)
def test_comb_is_made_before_the_wait(name: str) -> None:
    before, _, after = sass_of(name).partition("ACQBULK")
    assert count(before, "MUFU.RCP") >= FLASH[0]
    assert not count(after, "MUFU.RCP")


@pytest.mark.parametrize(("name", "loads"), [("norm", 2), ("finish", 2)])
def test_norm_weights_are_fetched_before_the_wait(name: str, loads: int) -> None:
    before, _, after = sass_of(name).partition("ACQBULK")
    assert len(re.findall(r"LDG\S*\.128\S*\.CONSTANT", before)) == loads
    assert not re.search(r"LDG\S*\.CONSTANT", after)


def test_prefill_products_run_on_the_tensor_cores() -> None:
    """Two of the streams at a time × 3 row tiles × 4 steps × 2 halves of fn."""
    assert count(sass_of("prefill seam"), "HMMA.1688.F32.TF32") == 48
