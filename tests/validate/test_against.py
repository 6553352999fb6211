"""``--against``: the first wrong value in the order of execution, names of one side, and what does
not fit together.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.checkpoint import tiny_config, write_synthetic
from dsv4.demo import CHECKPOINT
from dsv4.layers.values import LAYER_VALUES
from dsv4.validate.cosine import main
from dsv4.validate.names import execution_order
from tests.model.tiny import raw_config
from tests.validate.trace_files import random, write

CONFIG = raw_config((0, 4))


def values() -> dict[str, Tensor]:
    """Of two layers, the second with an indexer."""
    experts = random(6, 8).argsort(1)[:, :3].contiguous()
    entries = torch.tensor([[-1, -1]] * 3 + [[0, -1]] * 3)
    scores = random(6, 2).masked_fill(entries < 0, -torch.inf)
    return {
        "layers.0.attn.q": random(6, 4, 8),
        "layers.0.streams": random(6, 4, 16, seed=1),
        "layers.1.attn_hc.post": random(6, 4, seed=2),
        "layers.1.attn.compressed": random(1, 8, seed=3),
        "layers.1.indexer.entries": entries,
        "layers.1.indexer.scores": scores,
        "layers.1.router.experts": experts,
        "layers.1.router.weights": random(6, 3, seed=4),
        "layers.1.streams": random(6, 4, 16, seed=5),
        "hidden": random(6, 16, seed=6),
        "logits": random(6, 89, seed=7),
    }


def changed(name: str, token: int) -> dict[str, Tensor]:
    result = values()
    result[name][token] += 9
    return result


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return write(tmp_path / "ours.safetensors", values(), config=CONFIG)


def compare(ours: Path, *theirs: Path, options: tuple[str, ...] = ()) -> int:
    return main(["--trace", str(ours), *options, "--against", *map(str, theirs)])


def test_the_same_values_in_another_order_of_ids_pass(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = values()
    for ids, numbers in (
        ("layers.1.router.experts", "layers.1.router.weights"),
        ("layers.1.indexer.entries", "layers.1.indexer.scores"),
    ):
        other[ids] = other[ids].flip(1).contiguous()
        other[numbers] = other[numbers].flip(1).contiguous()
    theirs = write(tmp_path / "theirs.safetensors", other)
    assert compare(ours, theirs) == 0
    out = capsys.readouterr().out
    assert out.endswith("every value is above the threshold\n")
    names = list(values())
    names[4:6] = names[5:3:-1]
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == names
    assert "layers.1.streams         CSA" in out


@pytest.mark.parametrize(
    ("name", "token", "found"),
    [
        ("layers.0.attn.q", 4, "layers.0.attn.q (SWA), token 4"),
        ("layers.1.attn.compressed", 0, "layers.1.attn.compressed (CSA), entry 0"),
        ("layers.1.indexer.scores", 5, "layers.1.indexer.scores (CSA), token 5"),
        ("layers.1.indexer.entries", 3, "layers.1.indexer.entries (CSA), token 3"),
        ("layers.1.router.experts", 2, "layers.1.router.experts (CSA), token 2"),
        ("layers.1.router.weights", 1, "layers.1.router.weights (CSA), token 1"),
        ("logits", 5, "logits, token 5"),
    ],
)
def test_the_first_wrong_value_and_token_are_named(
    name: str, token: int, found: str, ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    theirs = write(tmp_path / "theirs.safetensors", changed(name, token))
    json_file = tmp_path / "out.json"
    svg_file = tmp_path / "out.svg"
    options = ("--json", str(json_file), "--svg", str(svg_file))
    assert compare(ours, theirs, options=options) == 1
    assert capsys.readouterr().out.endswith(f"first under the threshold: {found}\n")
    written = json.loads(json_file.read_text())
    assert written["first"] == {"name": name, "row": token}
    assert len(written["rows"]) == len(values())
    assert "--against" in written["command"]
    assert svg_file.read_text().count("<title>") == len(values())


def test_names_of_one_side_are_listed_and_ids_are_needed_for_weights(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = values()
    del other["layers.1.router.experts"]
    del other["hidden"]
    other["layers.0.mine"] = random(6, 2)
    assert compare(ours, write(tmp_path / "theirs.safetensors", other)) == 0
    out = capsys.readouterr().out
    names = "layers.*.router.experts, layers.*.router.weights, hidden"
    assert f"only in ours, or without its ids: {names}\n" in out
    names = "layers.*.mine, layers.*.router.weights"
    assert f"only in theirs, or without its ids: {names}\n" in out


def test_layers_without_a_common_value_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    named = [f"layers.{layer}.{value}" for layer in range(6) for value in ("attn.kv", "streams")]
    paths = [
        write(tmp_path / f"{side}.safetensors", {name: random(6, 2) for name in [*names, "hidden"]})
        for side, names in (("ours", named[:10]), ("theirs", [named[1], named[6], *named[10:]]))
    ]
    assert compare(*paths) == 0
    out = capsys.readouterr().out
    only = "or without its ids: layers"
    assert f"only in ours, {only}.0.attn.kv, layers.1-2,4.*, layers.3.streams\n" in out
    assert f"only in theirs, {only}.5.*\n" in out


def test_what_an_engine_has_and_their_file_lacks_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    theirs = write(tmp_path / "theirs.safetensors", {"layers.2.attn.kv": random(6, 512)})
    assert main(["--device", "cpu", "--against", str(theirs)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "only in" in line]
    assert line.startswith("only in ours, or without its ids: layers.0-1,3-5.*, layers.*.attn_hc.")
    assert line.endswith(", layers.*.streams, hidden, logits")


def test_ranks_that_differ_fail(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    q = values()["layers.0.attn.q"]
    hidden = values()["hidden"]
    paths = [
        write(
            tmp_path / f"{rank}.safetensors",
            {
                "layers.0.attn.q": q[:, 2 * rank : 2 * rank + 2].contiguous(),
                "hidden": hidden + 1e-6 * rank,
            },
            rank=str(rank),
            ranks="2",
        )
        for rank in range(2)
    ]
    given_one_by_one = [word for path in paths for word in ("--against", str(path))]
    assert main(["--trace", str(ours), *given_one_by_one]) == compare(ours, *paths) == 1
    out = capsys.readouterr().out
    assert "hidden: ranks 0 and 1 differ by up to" in out
    assert out.endswith("every value is above the threshold, but ranks differ\n")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"token_ids": torch.arange(11, 17)}, "token_ids[0]: found 11, expected 10 as in ours"),
        ({"token_ids": torch.arange(7), "positions": torch.arange(7)}, "found 7, expected 6"),
        ({"hidden": random(5, 16)}, "hidden: found 5, expected 6 rows as in ours"),
        ({"hidden": random(6, 17)}, "hidden: found [6, 17], expected [6, 16] as in ours"),
        ({"hidden": random(6, 4, 4)}, "hidden: found [6, 4, 4], expected [6, 16] as in ours"),
        ({"hidden": torch.tensor(1.0)}, "hidden: found a scalar, expected rows [T, ...]"),
        (
            {"hidden": torch.complex(random(6, 16), random(6, 16, seed=1))},
            "hidden: found C64, expected one of F64, F32, ",
        ),
        (
            {"layers.1.router.experts": torch.zeros(6, 3)},
            "layers.1.router.experts: found F32, expected integers",
        ),
        (
            {"layers.1.router.weights": random(6, 6)},
            "layers.1.router.weights: found [6, 6], expected [6, 3] as router.experts has",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    other: dict[str, Any], message: str, ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    theirs = write(tmp_path / "theirs.safetensors", {**values(), **other})
    assert compare(ours, theirs) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("columns", [2, 6])
def test_our_weights_have_a_column_for_every_expert(
    columns: int, ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = {**values(), "layers.1.router.weights": random(6, columns)}
    assert compare(write(tmp_path / "other.safetensors", other), ours) == 2
    error = capsys.readouterr().err
    assert f"other.safetensors: layers.1.router.weights: found [6, {columns}], expected" in error
    assert error.count("\n") == 1


def test_ids_of_one_dimension_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write(tmp_path / "a.safetensors", {"layers.1.router.experts": torch.arange(6)})
    assert compare(path, path) == 2
    expected = f"error: {path}: layers.1.router.experts: found [6], expected [T, K]\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("side", ["--trace", "--model"])
@pytest.mark.parametrize("names", [[], ["layers.1.router.weights"]])
def test_no_common_value_is_an_error_before_a_model_is_loaded(
    side: str,
    names: list[str],
    ours: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("a model is loaded"))
    theirs = write(tmp_path / "theirs.safetensors", {name: random(6, 3) for name in names})
    given = {"--trace": ours, "--model": CHECKPOINT}
    assert main([side, str(given[side]), "--against", str(theirs)]) == 2
    expected = f"error: {theirs}: found no value that both traces have\n"
    assert capsys.readouterr() == ("", expected)


def test_values_without_rows_alone_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    values = {"layers.2.attn.compressed": random(0, 8)}
    theirs = write(tmp_path / "theirs.safetensors", values)
    assert compare(theirs, theirs) == 2
    expected = f"error: {theirs}: found no row of values that both traces have\n"
    assert capsys.readouterr() == ("", expected)


def test_a_token_that_the_engine_lacks_is_named_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    values = {"token_ids": torch.tensor([5, 2560]), "logits": random(2, 2560)}
    theirs = write(tmp_path / "theirs.safetensors", values, tokens=2)
    assert main(["--device", "cpu", "--against", str(theirs)]) == 2
    expected = f"error: {theirs}: token_ids[1]: found 2560, expected 0 to 2559\n"
    assert capsys.readouterr().err == expected


def test_a_trace_may_be_as_long_as_the_model_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = tmp_path / "model"
    write_synthetic(model, tiny_config(max_position_embeddings=12), "nvfp4-experts", 0)
    for tokens, code in ((12, 1), (13, 2)):
        values = {"layers.0.attn_hc.post": random(tokens, 4)}
        theirs = write(tmp_path / "theirs.safetensors", values, tokens)
        arguments = ["--model", str(model), "--device", "cpu", "--against", str(theirs)]
        assert main(arguments) == code
    limit = "expected at most 12 (max_position_embeddings)"
    expected = f"error: {theirs}: token_ids: found 13, {limit}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "a"], "--trace: found without --against"),
        (["--against", "a", "--random-tokens", "3"], "--random-tokens: found with --against"),
        (["--against", "a", "--trace", "b", "--chunk", "3"], "--chunk: found with --against and"),
        (["--against", "a", "--trace", "b", "--svg", "b"], "--svg: b: found the file of --trace"),
        (["--against", "none.safetensors"], "none.safetensors: no such file"),
    ],
)
def test_unused_flags_and_missing_files_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_order_of_execution_is_that_of_the_document() -> None:
    names = ["logits", "hidden", "layers.10.attn_hc.x", "layers.2.streams", "layers.2.mine", "odd"]
    assert sorted(names, key=execution_order) == [
        *("layers.2.streams", "layers.2.mine", "layers.10.attn_hc.x"),
        *("hidden", "logits", "odd"),
    ]
    assert len(LAYER_VALUES) == len(set(LAYER_VALUES)) == 22
