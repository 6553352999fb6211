"""The small kernels around a step compile for every target without spilling; no GPU needed."""

import pytest

from dsv4.launch.kernel import Defines
from dsv4.launch.target import ARCHITECTURES
from tests.ops.sass import compile_once, resources

# Source, what it is compiled with, its kernels.
KERNELS: list[tuple[str, Defines, tuple[str, ...]]] = [
    ("acceptance/settle", (), ("enter_drafts", "settle_block")),
    ("channel/channel", (("EARLY", 0),), ("receive_rows", "send_rows", "take_tokens")),
    ("channel/channel", (("EARLY", 1),), ("receive_rows", "send_rows", "take_tokens")),
    (
        "channel/channel",
        (("EARLY", 0), ("HALVES", 1)),
        ("receive_rows", "send_rows", "take_tokens"),
    ),
    (
        "draft_rows/draft_rows",
        (),
        ("begin_rows", "token_mixing", "shift_streams", "recall_streams"),
    ),
    ("kv_write/kv_write", (), ("kv_write", "kv_write_any_geometry")),
    ("markov/markov", (("FLOAT_TABLE", 0),), ("markov_row", "markov_add")),
    ("markov/markov", (("FLOAT_TABLE", 1),), ("markov_row", "markov_add")),
    ("norm/rms_norm", (("COUNT", 8), ("GROUPS", 1)), ("rms_norm",)),
    ("norm/rms_norm", (("COUNT", 1), ("GROUPS", 7)), ("rms_norm",)),
    ("opening/opening", (), ("embed", "embed_any_geometry", "next_positions")),
    *(
        (
            "quantize_activations/quantize_activations",
            (("NVFP4", nvfp4), ("NORM", norm), ("GROUPS", groups), ("ALIGNED", aligned)),
            ("quantize_rows", "quantize_sorted_rows"),
        )
        for nvfp4 in (0, 1)
        for norm, groups, aligned in ((0, 1, 1), (0, 1, 0), (0, 8, 1), (1, 1, 1), (1, 4, 1))
    ),
    ("scatter/scatter", (), ("scatter",)),
    ("rope/query_rope", (), ("query_rope", "query_rope_any_geometry")),
    ("rope/query_rope", (("WIDTH", 128), ("ROPE", 64)), ("query_rope", "query_rope_any_geometry")),
    (
        "router/router",
        (("EXPERTS", 256), ("EXPERTS_PER_TOKEN", 6), ("HASH", 1)),
        ("router_select",),
    ),
    (
        "router/router",
        (("EXPERTS", 384), ("EXPERTS_PER_TOKEN", 6), ("HASH", 0)),
        ("router_select",),
    ),
    ("stream_means/stream_means", (), ("stream_means",)),
    ("token_ring/token_ring", (), ("store_token",)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("source", "defines", "kernels"), KERNELS)
def test_compiles_without_spills(source: str, defines: Defines, kernels: tuple[str, ...]) -> None:
    for architecture in ARCHITECTURES:
        found = resources(compile_once(source, architecture, defines).log)
        spills = {name: spill for name, (_, spill) in found.items()}
        assert spills == dict.fromkeys(kernels, 0), architecture
