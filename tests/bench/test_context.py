"""The benchmark by position and length: what it makes of times, and its memory plans."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4.bench.__main__ import main
from dsv4.bench.context import ContextRun, check_positions, chunk_milliseconds, spans
from dsv4.bench.context_memory import PlacedGeometry, described, placed
from dsv4.checkpoint import Layout, describe, open_checkpoint, tiny_config, write_synthetic
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.launch.target import Target
from dsv4.ops.tables import CUDA_TABLE
from dsv4.parallel.devices import engine_devices

MILLION = 1 << 20


def test_the_time_of_a_chunk_is_from_end_to_end() -> None:
    """Two chunks ahead: the host sees chunk 0 end when it has queued chunk 2."""
    ends = [0.0, 0.0, 1.0, 1.5, 2.5, 2.75]
    assert chunk_milliseconds(ends, 2) == [500.0, 1000.0, 250.0]


def test_spans_are_medians_of_consecutive_chunks_behind_the_first() -> None:
    found = spans([10.0, 30.0, 20.0, 40.0, 80.0], 100, 3)
    assert [(span["from"], span["to"], span["ms_per_chunk"]) for span in found] == [
        (100, 400, 20.0),
        (400, 600, 60.0),
    ]
    assert found[0]["tokens_per_second"] == 5000.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"positions": (1, MILLION - 6 * 2048)}, None),
        ({"positions": (1, MILLION - 6 * 2048 + 1)}, "--positions: found 1036289, expected at"),
        ({"prompt": MILLION}, "--prompt: found 1048576, expected at most"),
        ({"lengths": (16, MILLION + 1)}, "--lengths: found 1048577, expected at most 1048576"),
    ],
)
def test_what_is_timed_has_room_behind_its_position(
    changed: dict[str, Any], message: str | None
) -> None:
    """Behind a position six chunks are prefilled: four that are in flight, and two to compare."""
    engine = EngineConfig(prefill_chunk=2048, max_context=MILLION, gpus=2)
    run = ContextRun(
        "v4-flash", "nvfp4-experts", None, engine, 1 << 18, (1_000_000,), (MILLION,), 64, ("full",)
    )
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_positions(replace(run, **changed), engine, 2)


@pytest.mark.parametrize(
    ("context", "chunk", "decode_tokens", "least"),
    [(4 * 4096 + 1, 4096, 64, None), (4 * 4096, 4096, 64, 16385), (16, 1, 64, 73)],
)
def test_a_context_without_room_for_any_position_is_refused_by_its_own_flag(
    context: int, chunk: int, decode_tokens: int, least: int | None
) -> None:
    """No position of at least 1 would be one that is expected."""
    engine = EngineConfig(prefill_chunk=chunk, max_context=context)
    run = ContextRun(
        "v4-flash", "nvfp4-experts", None, engine, 1, (1,), (16,), decode_tokens, ("full",)
    )
    message = f"^--max-context: found {context}, expected at least {least} "
    with pytest.raises(UserError, match=message) if least else nullcontext():
        check_positions(run, engine, 1)


@pytest.mark.parametrize("layout", ["nvfp4-experts", "nvfp4-all", "native"])
def test_a_geometry_takes_what_its_checkpoint_takes(tmp_path: Path, layout: Layout) -> None:
    raw = tiny_config()
    write_synthetic(tmp_path / "x", raw, layout, 0)
    config = ModelConfig.from_dict(raw)
    stored = {one.parameter.name: one for one in describe(open_checkpoint(tmp_path / "x"), config)}
    for one in described(config, layout):
        assert one.format == stored[one.parameter.name].format, one.parameter.name
        if one.format is not None:
            assert one.nbytes == stored[one.parameter.name].nbytes, one.parameter.name


def test_the_plan_of_a_geometry_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    """``--plan --max-context 1048576`` of a folder, for two GPUs that are not there."""
    raw = tiny_config(max_position_embeddings=MILLION)
    write_synthetic(tmp_path / "x", raw, "nvfp4-experts", 0)
    engine = EngineConfig(gpus=2, max_context=MILLION, prefill_chunk=2048)
    of_folder = Engine.plan(tmp_path / "x", engine, gpu_memory=10**11)
    config = ModelConfig.from_dict(raw)
    devices = engine_devices(engine, absent=True)
    placement = placed(config, "nvfp4-experts", engine, devices)
    targets = {device: Target.of_absent(device) for device in devices}
    geometry = PlacedGeometry(config, "nvfp4-experts", engine, placement, targets)
    plan, workspace = geometry.plans(CUDA_TABLE, [MILLION], 10**11)[MILLION]
    assert of_folder.max_context == plan.max_context == MILLION
    for found, expected in zip(plan.devices, of_folder.devices, strict=True):
        assert found.layers == expected.layers
        assert found.state_bytes == expected.state_bytes
        assert found.work_bytes == expected.work_bytes == workspace[found.device] + (1152 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("geometry", "gpus", "parallel", "most"),
    [
        ("v4-flash", 2, "pipeline", 90),
        ("v4-flash", 2, "tensor", 91),
        ("v4-pro", 8, "pipeline", 125),
        ("v4-pro", 8, "tensor", 127),
    ],
)
def test_a_million_tokens_are_planned_and_fit(
    tmp_path: Path, geometry: str, gpus: int, parallel: str, most: int
) -> None:
    """On H200, GB of the fullest one. Only caches, lists and the copies of a step grow."""
    out = tmp_path / "plan.json"
    flags = ["--geometry", geometry, "--gpus", str(gpus), "--parallel", parallel]
    lengths = ["--lengths", "16384", str(MILLION)]
    assert main(["context", *flags, *lengths, "--plan-only", "141", "--out", str(out)]) == 0
    result = json.loads(out.read_text())["result"]
    short, long = (result["planned_bytes"][str(length)] for length in (16384, MILLION))
    assert len(long) == gpus
    for name, device in long.items():
        assert device["fits"]
        assert device["total"] <= most * 10**9
        assert device["weights"] == short[name]["weights"]
        assert device["workspace"] - short[name]["workspace"] < 700 << 20
        grown = device["state"] - short[name]["state"]
        assert grown <= (MILLION - 16384) * 5600, "5.6 KB a token"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-context", "2097152"], "--max-context: found '2097152'"),
        (["--plan-only", "0"], "--plan-only: found '0'"),
        (["--plan-only", "141", "--lengths", "1048577"], "--lengths: found '1048577'"),
        (["--prefill-chunk", "65536"], "--prefill-chunk: found '65536'"),
    ],
)
def test_flags_out_of_range_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["context", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag",
    ["--max-context 4096", "--prompt 8", "--positions 8", "--decode-tokens 2", "--modes full"],
)
def test_a_plan_refuses_the_flags_of_what_runs(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["context", "--plan-only", "141", *flag.split()]) == 2
    expected = f"error: {flag.split()[0]}: found together with --plan-only, which runs nothing"
    assert capsys.readouterr().err == f"{expected}\n"
