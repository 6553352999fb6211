"""The benchmark's plots: well-formed, a bar per measurement, the floor where it belongs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dsv4.bench.panel import ticks
from dsv4.bench.plot import engine_svg, main, record_svg

SVG = "{http://www.w3.org/2000/svg}"


def record() -> dict[str, Any]:
    modes = {
        "eager": {"ms_per_token": 5.0},
        "split": {"ms_per_token": 3.0},
        "full": {"ms_per_token": 2.0},
    }
    return {
        "machine": {"gpus": ["NVIDIA H200"] * 8},
        "result": {
            "geometry": "v4-pro",
            "layout": "nvfp4-experts",
            "layers": 61,
            "placement": {
                "parallel": "pipeline",
                "layers": {"cuda:0": 31, "cuda:1": 30},
                "hops": 1,
            },
            "floor_ms": 1.0,
            "prefill_tokens_per_second": {"128": 4000.0, "8192": 30000.0},
            "decode": {"1024": {**modes, "us_per_layer": {"SWA": 3.0}}, "131072": modes},
        },
    }


def context_record() -> dict[str, Any]:
    modes = {"full": {"ms_per_token": 4.5}}
    devices = {"cuda:0": {"state": 10**9, "steps": 10**8}, "cuda:1": {"state": 10**8, "steps": 1}}
    span = {"from": 2048, "to": 18432, "ms_per_chunk": 100.0, "tokens_per_second": 20480.0}
    return {
        "machine": {"gpus": ["NVIDIA H200"] * 2},
        "result": {
            "geometry": "v4-flash",
            "layout": "nvfp4-experts",
            "layers": 43,
            "prefill_chunk": 2048,
            "placement": {"parallel": "tensor", "ranks": ["cuda:0", "cuda:1"]},
            "prefill_computed": {"tokens": 20480, "spans": [span]},
            "prefill_behind_drawn_caches": {
                "16384": {"ms_per_chunk": 101.0, "tokens_per_second": 20277.0},
                "1000000": {"ms_per_chunk": 400.0, "tokens_per_second": 5120.0},
            },
            "decode_behind_drawn_caches": {"16384": modes, "1000000": modes},
            "allocated_bytes": {"16384": devices, "1048576": devices},
        },
    }


def test_a_record_by_position_has_three_panels() -> None:
    text = record_svg(context_record())
    svg = ElementTree.fromstring(text)
    titles = [rect.findtext(f"{SVG}title") for rect in svg.iter(f"{SVG}rect")]
    bars = [title for title in titles if title is not None]
    assert bars == [
        *["full: 4.5"] * 2,
        *["computed: 20,480", "drawn caches: 20,277", "drawn caches: 5,120"],
        *["caches: 1", "steps: 0.1"] * 2,
    ]
    assert "v4-flash, 43 layers, nvfp4-experts, 2 × NVIDIA H200, tensor" in text
    assert all(label in text for label in (">16K<", ">1,000,000<", ">1,024K<"))


def test_every_measurement_is_a_bar_as_high_as_its_value() -> None:
    svg = ElementTree.fromstring(engine_svg(record()))
    bars = [rect for rect in svg.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    heights = [float(bar.attrib["height"]) for bar in bars]
    assert len(bars) == 2 * 3 + 2
    assert heights[0] / heights[2] == pytest.approx(2.5, rel=0.01)
    assert max(heights) < 340 - 64 - 44


def test_floor_is_drawn_at_its_value() -> None:
    svg = ElementTree.fromstring(engine_svg(record()))
    (floor,) = (line for line in svg.iter(f"{SVG}line") if "stroke-dasharray" in line.attrib)
    bar = next(rect for rect in svg.iter(f"{SVG}rect") if rect.findtext(f"{SVG}title") == "full: 2")
    base = 340 - 44
    top = float(bar.attrib["y"])
    assert base - float(floor.attrib["y1"]) == pytest.approx((base - top) / 2, abs=0.1)


def test_the_plot_says_what_the_floor_is() -> None:
    texts = [text.text for text in ElementTree.fromstring(engine_svg(record())).iter(f"{SVG}text")]
    assert "floor 1.00 ms" in texts
    assert any("floor: reading the weights that one token needs" in (text or "") for text in texts)


@pytest.mark.parametrize("made", [record, context_record])
def test_no_text_lies_on_another_or_outside(made: Callable[[], dict[str, Any]]) -> None:
    """Widths as in a sans-serif font: half the size for each character."""
    svg = ElementTree.fromstring(record_svg(made()))
    boxes = []
    for text in svg.iter(f"{SVG}text"):
        size = float(text.get("font-size", 11))
        width = len(text.text or "") * size * 0.5
        left = float(text.attrib["x"])
        left -= {"end": width, "middle": width / 2}.get(text.get("text-anchor", "start"), 0)
        bottom = float(text.attrib["y"])
        boxes.append((left, left + width, bottom - size * 0.8, bottom, text.text))
    for index, (left, right, top, bottom, text) in enumerate(boxes):
        assert left >= 0
        assert right <= float(svg.attrib["width"])
        assert bottom <= float(svg.attrib["height"]), text
        for other in boxes[index + 1 :]:
            apart = right <= other[0] or other[1] <= left or bottom <= other[2] or other[3] <= top
            assert apart, (text, other[4])


def test_title_says_what_ran_where() -> None:
    assert "v4-pro, 61 layers, nvfp4-experts, 2 × NVIDIA H200, pipeline" in engine_svg(record())


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (5.5, [0, 1, 2, 3, 4, 5]),
        (33000.0, [0, 10000, 20000, 30000]),
        (0.9, [0, 0.2, 0.4, 0.6, 0.8]),
    ],
)
def test_ticks_are_round(top: float, expected: list[float]) -> None:
    assert ticks(top) == expected


def test_the_command_writes_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(record()))
    assert main([str(path)]) == 0
    assert path.with_suffix(".svg").read_text() == engine_svg(record())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.svg"], "plot of a.svg: a.svg: found the file of FILE, expected another one"),
        (["a.json", "a.svg"], "plot of a.json: a.svg: found the file of FILE"),
        (["a.json", "a.txt"], "plot of a.txt: a.svg: found the file of plot of a.json"),
        (["a.json", "."], ".: Is a directory"),
    ],
)
def test_a_plot_replaces_no_record_and_no_other_plot(
    names: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in set(names) - {"."}:
        Path(name).write_text(json.dumps(record()))
    assert main(names) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert {path.name for path in tmp_path.iterdir()} == set(names) - {"."}
    assert all(json.loads(path.read_text()) == record() for path in tmp_path.iterdir())


@pytest.mark.parametrize("made", [record, context_record])
@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.pop("machine"),
        lambda record: record["machine"].update(gpus=[]),
        lambda record: record["result"].update(placement=[]),
        lambda record: record["result"].update(prefill_computed={}, prefill_tokens_per_second={}),
        lambda record: record["result"].update(
            decode={"x": {}}, decode_behind_drawn_caches={"1": {"full": "fast"}}
        ),
    ],
)
def test_damaged_records_are_one_line(
    made: Callable[[], dict[str, Any]],
    damage: Callable[[dict[str, Any]], object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged = made()
    damage(damaged)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(damaged))
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: damaged record (")
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["{}", "[]", "not json", '{"result": {"geometry": "v4-pro"}}'])
def test_other_files_are_one_line(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_plan_is_no_record_that_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"result": {"geometry": "v4-pro", "planned_bytes": {}}}))
    assert main([str(path)]) == 2
    assert "or of 'bench context' without --plan-only" in capsys.readouterr().err
