"""Which kernels attention records, without a GPU: shapes of the models, unusual ones, and bad
input.
"""

import dataclasses

import pytest
import torch

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowFormat
from dsv4.launch.items import Launch
from dsv4.launch.kernel import Kernel
from dsv4.launch.target import Target
from dsv4.ops.attention import decode, prefill
from tests.ops.attention.meta import CSA, FORMATS, HCA, HEADS, LISTED, WINDOW, Case, layer
from tests.ops.recorded import (
    BLACKWELL,
    HOPPER,
    TARGETS,
    assert_serves_shorter_chunks,
    functions,
    launches,
    meta,
)

ANY_GEOMETRY = Kernel("attention/attention_any_geometry", "attention_any_geometry")


def defined(launch: Launch) -> dict[str, int]:
    return dict(launch.shape.kernel.defines)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize("model", HEADS)
@pytest.mark.parametrize("kind", ["window", "CSA", "HCA"])
def test_decode_of_a_model(model: str, kind: str, format: RowFormat, target: Target) -> None:
    for tokens in range(1, 9):
        (launch,) = layer(model, kind, format).record(tokens, target)
        assert launch.shape.kernel.function == "attention_decode"
        assert launch.shape.grid == (8, HEADS[model] // 16, tokens)
        assert (launch.shape.threads, launch.shape.cluster) == (256, 8)
        assert defined(launch)["LISTED"] == int(kind == "CSA")
        assert launch.arguments["partial"] is launch.arguments["counters"] is None


@pytest.mark.parametrize(
    ("model", "kind", "format", "stages"),
    [
        ("Flash", "CSA", RowFormat.KV_FP8, (80, 1)),
        ("Pro", "CSA", RowFormat.KV_FP8, (160, 1)),
        ("Flash", "CSA", RowFormat.PLAIN, (80, 1)),
        ("Pro", "CSA", RowFormat.PLAIN, (64, 2)),
        ("Pro", "HCA", RowFormat.KV_FP8, (80, 1)),
        ("Pro", "window", RowFormat.PLAIN, (80, 1)),
    ],
)
def test_a_block_holds_its_keys_in_as_few_stages_as_fit(
    model: str, kind: str, format: RowFormat, stages: tuple[int, int]
) -> None:
    (launch,) = layer(model, kind, format).record(1)
    assert (defined(launch)["TILE"], defined(launch)["STAGES"]) == stages
    # The list follows the rest: turns of four for a cluster of eight.
    keys = WINDOW + (LISTED[model] if kind == "CSA" else 0)
    assert launch.shape.shared_bytes == defined(launch)["SHARED_BYTES"] + keys // 8 * 4


@pytest.mark.parametrize(
    ("heads", "tokens", "listed", "rows_first"),
    [
        (16, 1, 512, 1),
        (32, 1, 512, 1),
        (16, 2, 512, 1),
        (32, 2, 512, 0),
        (64, 1, 512, 0),
        (16, 1, 2048, 0),
        (16, 1, None, 0),
    ],
)
def test_few_clusters_with_a_list_hold_up_the_next_kernel(
    heads: int, tokens: int, listed: int | None, rows_first: int
) -> None:
    """But not where their keys come in several stages."""
    (launch,) = Case(heads, CSA if listed else HCA, listed, 2048).record(tokens)
    assert defined(launch)["ROWS_FIRST"] == rows_first


@pytest.mark.parametrize(
    ("heads", "tokens", "target", "splits"),
    [
        (64, 1, HOPPER, 3),
        (128, 1, HOPPER, 1),
        (64, 1, BLACKWELL, 4),
        (128, 1, BLACKWELL, 2),
        (64, 2, HOPPER, 3),
        (128, 8, HOPPER, 1),
        (16, 1, HOPPER, 4),
        (16, 8, HOPPER, 4),
        (64, 1, dataclasses.replace(BLACKWELL, clusters=((8, 11),)), 2),
    ],
)
def test_clusters_share_many_keys(heads: int, tokens: int, target: Target, splits: int) -> None:
    """As many for any number of tokens."""
    (launch,) = Case(heads, HCA, None, 8200).record(tokens, target)
    assert defined(launch)["SPLITS"] == splits
    assert launch.shape.grid == (8 * splits, heads // 16, tokens)
    partial = launch.arguments["partial"]
    counters = launch.arguments["counters"]
    assert (partial is None) == (counters is None) == (splits == 1)
    if isinstance(partial, torch.Tensor) and isinstance(counters, torch.Tensor):
        units = heads // 16 * tokens
        # Every thread leaves the values that it finishes, a maximum and a sum.
        assert partial.shape == (splits * 8 * units, 16 * 512 // 8 + 2 * 256)
        assert counters.shape == (8 * units,)


def test_up_to_2048_keys_one_cluster_is_enough() -> None:
    for entries, splits in ((1920, 1), (1921, 3)):
        (launch,) = Case(64, HCA, None, entries).record(1)
        assert defined(launch)["SPLITS"] == splits


UNUSUAL = {
    "narrow": Case(3, CSA, 12, 60, width=64, rope_width=16),
    "odd": Case(3, CSA, 12, 60, width=20, rope_width=6),
    "rotary": Case(3, HCA, None, 60, width=512, rope_width=32),
    "float32": Case(4, HCA, None, 60, RowFormat.PLAIN, dtype=torch.float32),
    "long list": Case(64, CSA, 200_000, 300_000),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_decode_of_unusual_geometries(name: str) -> None:
    case = UNUSUAL[name]
    (launch,) = case.record(3)
    assert launch.shape.kernel == ANY_GEOMETRY
    assert launch.shape.grid == (case.heads, 3, 1)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize("kind", ["window", "CSA", "HCA"])
@pytest.mark.parametrize("model", HEADS)
def test_prefill_of_a_model(model: str, kind: str, format: RowFormat) -> None:
    case = layer(model, kind, format)
    first = ["attention_prefill_dequantize"] if format is RowFormat.KV_FP8 else []
    hopper = case.record(512)
    other = case.record(512, BLACKWELL)
    assert functions(hopper) == [*first, "attention_prefill_sm90"]
    assert functions(other) == [*first, "attention_prefill"]
    units = 512 * HEADS[model] // 64
    assert hopper[-1].shape.grid == (132, 1, 1)
    assert other[-1].shape.grid == (units, 1, 1)
    if first:
        assert hopper[-1].arguments["ring"] is hopper[0].arguments["ring_out"]
        assert hopper[-1].arguments["compressed"] is hopper[0].arguments["compressed_out"]


@pytest.mark.parametrize(
    ("heads", "form", "unit", "blocks"),
    [
        (8, "attention_prefill_few_sm90", 16, 2),
        (16, "attention_prefill_few_sm90", 16, 2),
        (17, "attention_prefill_few_sm90", 32, 2),
        (32, "attention_prefill_few_sm90", 32, 2),
        (33, "attention_prefill_sm90", 64, 1),
    ],
)
def test_prefill_of_the_heads_of_a_rank(heads: int, form: str, unit: int, blocks: int) -> None:
    """``blocks`` of a multiprocessor, or as many as there are tokens."""
    case = Case(heads, CSA, 512)
    for tokens in (100, 512):
        launch = case.record(tokens)[-1]
        assert launch.shape.kernel.function == form
        assert defined(launch)["HEADS"] == unit
        assert launch.shape.grid == (min(tokens, 132 * blocks), 1, 1)
    assert functions(case.record(512, BLACKWELL))[-1] == "attention_prefill"


def test_the_portable_kernel_runs_on_any_gpu() -> None:
    case = layer("Flash", "CSA")
    op = prefill.sparse_attention_portable
    found = launches(op, *case.arguments(40), tokens=40)
    assert functions(found) == ["attention_prefill_dequantize", "attention_prefill"]
    with pytest.raises(ValueError, match=r"keys\.ring: found .* expected"):
        launches(op, *UNUSUAL["odd"].arguments(40), tokens=40)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case(3, CSA, 12, 60, width=64, rope_width=16), "attention_prefill"),
        (Case(3, HCA, None, 60, width=256, rope_width=64), "attention_prefill"),
        (Case(3, HCA, None, 60, width=512, rope_width=32), "attention_prefill_few_sm90"),
        (Case(64, CSA, 2048, 4000), "attention_prefill_sm90"),
        (Case(64, CSA, 2049, 4000), "attention_any_geometry"),
        (UNUSUAL["odd"], "attention_any_geometry"),
        (UNUSUAL["float32"], "attention_any_geometry"),
        (Case(3, HCA, None, 60, width=96, rope_width=32), "attention_any_geometry"),
        (Case(3, HCA, None, 60, width=64, rope_width=56), "attention_any_geometry"),
        (Case(3, HCA, None, 60, RowFormat.PLAIN, width=64, rope_width=56), "attention_prefill"),
    ],
)
def test_prefill_of_other_geometries(case: Case, expected: str) -> None:
    assert functions(case.record(20))[-1] == expected


def test_an_empty_list_is_no_entries() -> None:
    launch = Case(64, CSA, 0, 4000).record(20)[-1]
    assert launch.arguments["compressed"] is launch.arguments["selected"] is None


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("most", [512, 2048])
@pytest.mark.parametrize("kind", ["window", "CSA", "HCA", "narrow", "odd"])
def test_a_prefill_recording_serves_shorter_chunks(kind: str, most: int, target: Target) -> None:
    case = UNUSUAL[kind] if kind in UNUSUAL else layer("Pro", kind)
    assert_serves_shorter_chunks(lambda tokens: case.record(tokens, target), most)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize(
    ("name", "index", "broken"),
    [
        ("q_THD", 0, meta(20, 64, 512, dtype=torch.float32)),
        ("q_THD", 0, meta(20, 64, 64)),
        ("q_THD", 0, meta(20, 64, 1024)[..., :512]),
        ("q_THD", 0, meta(20 * 64 * 512 + 1)[1:].view(20, 64, 512)),
        ("selected_TK", 2, meta(20, 512, dtype=torch.int32)),
        ("selected_TK", 2, meta(20, 1024, dtype=torch.int64)[:, ::2]),
        ("sink_H", 3, meta(63, dtype=torch.float32)),
        ("sink_H", 3, meta(64)),
        ("positions_T", 4, meta(20, dtype=torch.int32)),
        ("inv_freq", 5, meta(16, dtype=torch.float32)),
    ],
)
def test_bad_input_is_named(name: str, index: int, broken: torch.Tensor, tokens: int) -> None:
    op = decode.sparse_attention if tokens == 1 else prefill.sparse_attention
    arguments = list(layer("Flash", "CSA").arguments(tokens))
    per_token = broken.shape[0] == 20
    arguments[index] = broken[:tokens] if per_token else broken
    with pytest.raises(ValueError, match=f"^{name}: found .*expected"):
        launches(op, *arguments, tokens=tokens)


def test_caches_of_two_kinds_are_refused() -> None:
    arguments = list(layer("Flash", "HCA").arguments(2))
    keys = arguments[1]
    assert isinstance(keys, KeySet)
    arguments[1] = dataclasses.replace(keys, compressed=Case(format=RowFormat.PLAIN).rows(65))
    with pytest.raises(ValueError, match=r"keys\.compressed: found"):
        launches(decode.sparse_attention, *arguments, tokens=2)
