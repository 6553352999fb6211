"""Compressor, index query, index scores and top-k compile for every architecture, without spills."""

import pytest

from dsv4.launch.loader import ARCHITECTURES, Defines, compile_source
from tests.ops.sass import count, disassemble, resources

VARIANTS: tuple[tuple[str, Defines], ...] = (
    ("compressor", (("RATIO", 4), ("GROUPS", 1), ("BLOCKS", 1))),
    ("compressor", (("RATIO", 128), ("GROUPS", 8), ("BLOCKS", 8))),
    ("index_query", (("WIDTH", 128), ("ROPE", 64))),
    ("index_scores", (("HEADS", 64), ("FP8", 1))),
    ("top_k", (("CLUSTER", 8), ("THREADS", 1024), ("STRIPS", 4))),
    ("top_k", (("CLUSTER", 1), ("THREADS", 512), ("STRIPS", 8))),
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("source", "defines"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "-")
def test_compiles_without_spills(source: str, defines: Defines, architecture: str) -> None:
    for name, (registers, spilled_bytes) in resources(compile_source(source, architecture, defines).log).items():
        assert spilled_bytes == 0, f"{name}: {spilled_bytes} bytes spilled at {registers} registers"


def test_scores_convert_a_key_once_for_all_heads() -> None:
    """One tile: 8 steps of 8 head tiles on tensor cores, two conversions of two values per row and step."""
    sass = disassemble("index_scores", "sm_90a", (("HEADS", 64), ("FP8", 1)))
    assert count(sass, "HMMA.16816.F32") == 64


def test_rotary_bytes_are_cut_from_integers() -> None:
    """CUDA 13.0 once made the low byte of a bfloat16 by a second floating-point conversion."""
    assert count(disassemble("compressor", "sm_90a", (("RATIO", 4), ("GROUPS", 1))), "F2I.U8") == 0
