"""The sampling kernel compiles for every target, almost without spills; no GPU needed."""

import re

import torch

from dsv4.launch.kernel import Kernel
from dsv4.launch.target import ARCHITECTURES
from dsv4.ops.sampling.cuda import sample_token
from tests.ops.recorded import launches, meta
from tests.ops.sass import compile_once, disassemble, resources


def kernel(vocabulary: int = 129_280) -> Kernel:
    one = meta(1, dtype=torch.int64)
    logits_V, settings_4 = (meta(size, dtype=torch.float32) for size in (vocabulary, 4))
    (launch,) = launches(sample_token, logits_V, settings_4, one, one, tokens=1)
    return launch.shape.kernel


def test_compiles_almost_without_spills() -> None:
    """Top-p uses all 64 registers: a few values may be spilled, as the compiler has it."""
    for architecture in ARCHITECTURES:
        log = compile_once("sampling/sampling", architecture, kernel().defines).log
        found = resources(log)
        assert list(found) == ["sample_token"]
        assert max(spill for _, spill in found.values()) <= 32, architecture


def test_logits_are_on_their_way_before_the_settings_are_needed() -> None:
    """All 16 logits of a thread, the four settings, the position and the seed are asked for before
    the first branch.
    """
    sass = disassemble("sampling/sampling", "sm_90a", kernel().defines)
    loads, _, _ = sass.partition("ACQBULK")[2].partition("BRA")
    assert len(re.findall(r"LDG\.E\.128", loads)) == 4
    assert len(re.findall(r"LDG\.E(?:\.64)? ", loads)) == 6
