"""What a layer reads where the other side is a trace: never streams that the trace's layer did not
read.
"""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.ops.tables import DirectTable
from dsv4.validate.followed_choices import ENTRIES, EXPERTS, FollowedChoices
from dsv4.validate.layer_flags import make_walk, parse
from dsv4.validate.layer_shapes import layer_shape
from dsv4.validate.layers import main
from dsv4.validate.names import ALIGNED, CHOSEN, layer_of, suffix
from dsv4.validate.one_layer import Given
from tests.validate.small_model import SMALL, TOKENS
from tests.validate.trace_files import write


def arguments(model: Path, layers: str, reference: Path) -> list[str]:
    shared = ["--device", "cpu", "--model", str(model), "--chunk", "8", "--layers", layers]
    return [*shared, "--reference", str(reference)]


@pytest.mark.parametrize("layers", ["0:2", "1:3"])
def test_a_layer_reads_what_the_trace_left(
    model: Path, trace_file: Path, layers: str, tmp_path: Path
) -> None:
    flags = ["--input", "reference", "--json", str(tmp_path / "found.json")]
    assert main([*arguments(model, layers, trace_file), *flags]) == 0
    rows = [
        row
        for layer in json.loads((tmp_path / "found.json").read_text())["layers"]
        for row in layer["rows"]
    ]
    assert {row["worst_token"] for row in rows} == {1.0}


OTHER = {
    "router.experts": lambda ids_K: (ids_K + 1) % SMALL["n_routed_experts"],
    "indexer.entries": lambda ids_K: ids_K.masked_fill(ids_K == 0, -1),
}


@pytest.mark.parametrize("name", OTHER)
def test_torch_ops_follow_the_choices_of_a_trace(
    model: Path, trace_file: Path, name: str, tmp_path: Path
) -> None:
    """Near ties: its last token has other ones, with all that follows from them."""
    whole = load_file(trace_file)
    chosen = f"layers.3.{name}"
    other = whole[chosen].clone()
    other[-1] = OTHER[name](other[-1])
    flags = [*arguments(model, "3", trace_file), "--input", "reference"]
    with ExitStack() as stack:
        layer = make_walk(parse(flags, None), stack).found.load(3)
    experts, entries = (other if name == one else None for one in (EXPERTS, ENTRIES))
    followed = FollowedChoices(experts, entries)
    following = replace(layer, table=DirectTable(layer.table.packing, followed.ops))
    values = following.run(Given(TOKENS, whole["layers.3.attn_hc.streams"]), 8)
    path = write(tmp_path / "a.safetensors", {**whole, **values}, len(TOKENS))
    record = tmp_path / "found.json"
    flags = [*arguments(model, "3", path), "--input", "reference", "--json", str(record)]
    assert main([*flags, "--choices", "0.9"]) == 0
    (found,) = json.loads(record.read_text())["layers"]
    worst = {row["name"]: row["worst_token"] for row in found["rows"]}
    assert worst.pop(chosen) < 1
    assert set(worst.values()) == {1.0}
    assert main([*flags, "--choices", "1"]) == 1


def test_a_trace_without_streams_leaves_nothing_for_the_next_layer(
    model: Path, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whole = load_file(trace_file)
    names = ("token_ids", "layers.0.attn_hc.streams", "layers.0.attn.kv", "layers.1.attn.kv")
    kept = {name: whole[name] for name in names}
    path = write(tmp_path / "a.safetensors", kept, len(TOKENS))
    assert main([*arguments(model, "0:2", path), "--input", "reference"]) == 2
    captured = capsys.readouterr()
    assert f"error: {path}: found no streams that enter layer 1, " in captured.err
    assert captured.out == ""


def test_a_layer_that_a_trace_lacks_is_named_before_any_has_run(
    model: Path, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whole = load_file(trace_file)
    kept = {name: rows for name, rows in whole.items() if not name.startswith("layers.2.")}
    path = write(tmp_path / "a.safetensors", kept, len(TOKENS))
    assert main([*arguments(model, "0:3", path), "--input", "reference"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: {path}: found no value of layer 2\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("name", "rows", "found"),
    [
        ("layers.2.attn.kv", 21, "found [21, 3], expected [21, "),
        ("layers.2.attn_hc.streams", 20, "found 20, expected 21 rows"),
        ("layers.2.router.weights", 21, "found [21, 3], expected [21, "),
    ],
)
def test_a_shape_of_a_late_layer_is_named_before_any_has_run(
    model: Path,
    trace_file: Path,
    tmp_path: Path,
    name: str,
    rows: int,
    found: str,
    capsys: pytest.CaptureFixture,
) -> None:
    path = write(
        tmp_path / "a.safetensors", {**load_file(trace_file), name: torch.zeros(rows, 3)}, 21
    )
    flags = ["--input", str(path if name.endswith("streams") else trace_file)]
    assert main([*arguments(model, "0:3", path), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {path}: {name}: {found}")
    assert captured.out == ""


def test_the_shapes_of_a_layer_are_known_before_it_has_run(trace_file: Path) -> None:
    config = ModelConfig.from_dict(SMALL)
    for name, value in load_file(trace_file).items():
        if layer_of(name) is not None:
            shape = layer_shape(config, name, len(TOKENS))
            by_id = suffix(name) in (*CHOSEN, *ALIGNED)
            assert (len(shape), shape[:1] if by_id else shape) == (
                value.dim(),
                [len(value)] if by_id else list(value.shape),
            ), name


def test_a_reference_without_a_row_of_a_layer_is_one_line(
    model: Path, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whole = load_file(trace_file)
    kept = {name: whole[name] for name in ("token_ids", "layers.2.attn.compressed")}
    path = write(tmp_path / "a.safetensors", kept, len(TOKENS))
    assert main([*arguments(model, "2", path), "--input", str(trace_file)]) == 2
    assert capsys.readouterr().err == f"error: {path}: found no row of layer 2\n"


def write_rank(path: Path, whole: dict[str, Tensor], rank: int) -> Path:
    """One of two ranks with half of the heads each."""
    cut = (".attn.q", ".attn.heads")
    values = {
        name: value.chunk(2, 1)[rank].contiguous() if name.endswith(cut) else value
        for name, value in whole.items()
    }
    return write(path, values, len(TOKENS), rank=str(rank), ranks="2")


def test_ranks_of_a_trace_are_found_by_the_file_of_one(
    model: Path, trace_file: Path, tmp_path: Path
) -> None:
    whole = load_file(trace_file)
    for rank in (0, 1):
        path = write_rank(tmp_path / f"theirs.rank{rank}.safetensors", whole, rank)
    flags = ["--input", "reference", "--json", str(tmp_path / "found.json")]
    assert main([*arguments(model, "1:3", path), *flags]) == 0
    (first, _) = json.loads((tmp_path / "found.json").read_text())["layers"]
    heads = next(row for row in first["rows"] if row["name"] == "layers.1.attn.heads")
    assert heads["worst_token"] == 1.0


@pytest.mark.parametrize("name", ["layers.1.attn.kv", "layers.1.attn_hc.streams"])
def test_ranks_of_a_trace_that_differ_fail(
    model: Path, trace_file: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    whole = load_file(trace_file)
    write_rank(tmp_path / "a.rank0.safetensors", whole, 0)
    whole[name][3] += 1
    path = write_rank(tmp_path / "a.rank1.safetensors", whole, 1)
    flags = ["--input", "reference", "--json", str(tmp_path / "found.json")]
    assert main([*arguments(model, "0:2", path), *flags]) == 1
    out = capsys.readouterr().out
    assert f"{name}: ranks 0 and 1 differ by up to 1" in out
    assert "under the threshold" not in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert [*found["unequal"]] == [name]


@pytest.mark.parametrize(("flag", "output"), [("--input", "--json"), ("--reference", "--svg")])
@pytest.mark.parametrize("replaced", [0, 1])
def test_no_file_of_a_rank_is_replaced(
    model: Path,
    trace_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    flag: str,
    output: str,
    replaced: int,
) -> None:
    whole = load_file(trace_file)
    paths = [write_rank(tmp_path / f"a.rank{rank}.safetensors", whole, rank) for rank in (0, 1)]
    before = paths[replaced].read_bytes()
    flags = ["--device", "cpu", "--model", str(model), "--layers", "0", flag, str(paths[1])]
    assert main([*flags, output, str(paths[replaced])]) == 2
    found = f"error: {output}: {paths[replaced]}: found the file of {flag}, expected another one\n"
    assert capsys.readouterr().err == found
    assert paths[replaced].read_bytes() == before


@pytest.mark.parametrize("name", ["theirs.rank1.safetensors", "theirs.safetensors"])
def test_ranks_of_a_trace_that_are_not_beside_it_are_one_line(
    model: Path, trace_file: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    path = write_rank(tmp_path / name, load_file(trace_file), 1)
    assert main(arguments(model, "0", path)) == 2
    expected = "the files of the others beside it, named like it but for rank1"
    assert capsys.readouterr().err == (
        f"error: {path}: found rank1 of 2 ranks, expected {expected}\n"
    )


def test_a_layer_of_a_trace_is_not_compared_on_random_streams(
    model: Path, trace_file: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(arguments(model, "1", trace_file)) == 2
    captured = capsys.readouterr()
    found = "--input: found 'own' with a trace as reference and layers from 1, expected"
    assert found in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_from_the_first_layer_on_its_own_results_are_read(model: Path, trace_file: Path) -> None:
    assert main(arguments(model, "0:2", trace_file)) == 0


def test_wrong_choices_fail_at_every_threshold(
    model: Path, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    name = "layers.1.router.experts"
    values = load_file(trace_file)
    values[name] = 15 - values[name]
    path = write(tmp_path / "a.safetensors", values, len(TOKENS))
    flags = ["--input", str(trace_file), "--threshold", "-1"]
    assert main([*arguments(model, "1", path), *flags, "--choices", "0"]) == 0
    assert main([*arguments(model, "1", path), *flags]) == 1
    assert "under the threshold: router.experts\n" in capsys.readouterr().out


def test_a_near_tie_of_one_token_passes(
    model: Path, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """20 of 21 tokens choose the same experts."""
    name = "layers.1.router.experts"
    values = load_file(trace_file)
    values[name][3] += 16
    path = write(tmp_path / "a.safetensors", values, len(TOKENS))
    flags = [*arguments(model, "1", path), "--input", str(trace_file)]
    assert main([*flags, "--choices", "0.952"]) == 0
    assert "under the threshold" not in capsys.readouterr().out
    assert main([*flags, "--choices", "0.953"]) == 1
    assert "under the threshold: router.experts\n" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["router.weights", "indexer.scores"])
def test_another_value_of_the_same_ids_is_found(
    model: Path, trace_file: Path, tmp_path: Path, value: str, capsys: pytest.CaptureFixture
) -> None:
    values = load_file(trace_file)
    values[f"layers.1.{value}"][20] *= 1.2
    path = write(tmp_path / "a.safetensors", values, len(TOKENS))
    flags = ["--input", str(trace_file), "--json", str(tmp_path / "found.json")]
    assert main([*arguments(model, "1", path), *flags]) == 1
    assert f"under the threshold: {value}\n" in capsys.readouterr().out
    (layer,) = json.loads((tmp_path / "found.json").read_text())["layers"]
    row = next(row for row in layer["rows"] if row["name"] == f"layers.1.{value}")
    assert row["worst_token"] == pytest.approx(2 * 1.2 / (1 + 1.2**2), abs=1e-3)
    assert row["first_under"] == 20
