"""Validation layer by layer: the bits of the whole model, faults in their layer, memory."""

import json
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4 import Engine, EngineConfig
from dsv4.checkpoint.layer_weights import StoredLayers
from dsv4.ops import TORCH
from dsv4.ops.moe import Mixture
from dsv4.ops.router import Router
from dsv4.ops.tables import TORCH_TABLE
from dsv4.validate import layer_flags
from dsv4.validate.layer_flags import make_walk, parse
from dsv4.validate.layer_walk import EngineLayers, LayerResult
from dsv4.validate.layers import main
from dsv4.validate.one_layer import Given, OneLayer
from dsv4.weights.on_demand import WeightOnDemand
from tests.model.tiny import direct
from tests.validate.small_model import CONFIG, TOKENS
from tests.validate.trace_files import write

LAYERS = 4
EXPERT_BYTES = 4 * 128 * 64


def walk(arguments: Sequence[str]) -> list[LayerResult]:
    options = parse(["--device", "cpu", *arguments], None)
    with ExitStack() as stack:
        return list(make_walk(options, stack))


def failing(results: Sequence[LayerResult]) -> list[str]:
    return [row.name for result in results for row in result.rows if not row.passes]


def test_layers_on_their_own_results_are_the_whole_model_bit_for_bit(model: Path) -> None:
    source = StoredLayers(model)
    whole = Engine.load(model, CONFIG).trace(TOKENS)
    side = EngineLayers(source, CONFIG, TORCH_TABLE, [torch.device("cpu")])
    shape = (len(TOKENS), source.config.hc_mult, source.config.hidden_size)
    streams_TME = source.embedding(TOKENS)[:, None].expand(shape)
    for layer in range(LAYERS):
        values = side.load(layer).run(Given(TOKENS, streams_TME), chunk=8)
        assert values.keys() == {name for name in whole if name.startswith(f"layers.{layer}.")}
        for name, value in values.items():
            assert torch.equal(value, whole[name]), name
        streams_TME = values[f"layers.{layer}.streams"]


def wrong_attention(*given: Any) -> Tensor:
    return -TORCH.sparse_attention(*given)


def wrong_router(x_TE: Tensor, tokens_T: Tensor, router: Router, *given: Any) -> Mixture:
    return TORCH.moe(x_TE, tokens_T, replace(router, selection=-router.selection), *given)


def wrong_indexer(q_TID: Tensor, weight_TI: Tensor, *given: Any) -> Tensor:
    return TORCH.index_select(q_TID, -weight_TI, *given)


def fault_in(monkeypatch: pytest.MonkeyPatch, faulty: int, **ops: Any) -> None:
    """One layer of this engine has other ops; the reference is as it should be."""

    class Faulty(EngineLayers):
        def load(self, layer: int) -> OneLayer:
            loaded = super().load(layer)
            return (
                replace(loaded, table=direct(replace(TORCH, **ops))) if layer == faulty else loaded
            )

    made = iter([EngineLayers, Faulty])
    monkeypatch.setattr(layer_flags, "EngineLayers", lambda *fields: next(made)(*fields))


@pytest.mark.slow
@pytest.mark.parametrize("read", ["reference", "own", "trace"])
def test_a_fault_is_found_in_its_layer_only(
    model: Path, trace_file: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    fault_in(monkeypatch, 1, sparse_attention=wrong_attention)
    given = str(trace_file) if read == "trace" else read
    results = walk(["--model", str(model), "--input", given])
    assert {name.split(".")[1] for name in failing(results)} == {"1"}
    assert failing(results)[0] == "layers.1.attn.heads"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "ops", "value"),
    [
        (2, {"moe": wrong_router}, "router.experts"),
        (1, {"index_select": wrong_indexer}, "indexer.entries"),
    ],
)
def test_wrong_choices_are_found_and_values_behind_them_are_still_compared(
    model: Path, monkeypatch: pytest.MonkeyPatch, layer: int, ops: dict[str, Any], value: str
) -> None:
    fault_in(monkeypatch, layer, **ops)
    results = walk(["--model", str(model), "--context", "300"])
    assert failing(results) == [f"layers.{layer}.{value}"]
    values = {row.name for row in results[layer].rows}
    assert {f"layers.{layer}.ffn.output", f"layers.{layer}.streams"} <= values


def test_decoded_experts_live_one_matrix_at_a_time(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = 0
    peak = 0
    read: set[tuple[int | None, int]] = set()
    decode = WeightOnDemand.dequantize

    def counted(weight: WeightOnDemand) -> Tensor:
        nonlocal live, peak
        values = decode(weight)
        live += values.untyped_storage().nbytes()
        peak = max(peak, live)
        read.add((weight.index, id(weight.read)))
        weakref.finalize(values.untyped_storage(), gone, values.untyped_storage().nbytes())
        return values

    def gone(nbytes: int) -> None:
        nonlocal live
        live -= nbytes

    monkeypatch.setattr(WeightOnDemand, "dequantize", counted)
    (result,) = walk(["--model", str(model), "--layers", "3", "--tokens", "3"])
    assert not failing([result])
    assert EXPERT_BYTES <= peak <= 2 * EXPERT_BYTES
    assert live == 0
    chosen = {index for index, _ in read}
    assert len(chosen) <= 6
    assert None not in chosen


def test_a_trace_stands_for_the_reference_and_for_the_input(
    model: Path, trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["--input", str(trace_file), "--reference", str(trace_file)]
    outputs = ["--json", str(tmp_path / "a.json"), "--svg", str(tmp_path / "a.svg")]
    monkeypatch.chdir(model)
    arguments = ["--device", "cpu", "--model", ".", "--layers", "1:3", "--chunk", "8"]
    assert main([*arguments, *files, *outputs]) == 0
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["model"] == "tiny"
    assert [layer["layer"] for layer in written["layers"]] == [1, 2]
    assert {row["worst_token"] for layer in written["layers"] for row in layer["rows"]} == {1.0}
    assert written["tokens"] == len(TOKENS)
    assert 0.05 < written["peak_memory_gb"]["host"] < 10
    assert "layer 1, 8" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("flag", "changed", "message"),
    [
        ("--input", {"token_ids": [-1] * 21}, "token_ids[0]: found -1, expected 0 to "),
        ("--reference", {"token_ids": [10**6] * 21}, "token_ids[0]: found 1000000, expected 0 to "),
        (
            "--input",
            {"layers.1.attn_hc.streams": torch.zeros(21, 4, 8)},
            "layers.1.attn_hc.streams: found [21, 4, 8], expected [21, 4, 128] as in this engine",
        ),
        (
            "--input",
            {"layers.1.attn_hc.streams": torch.zeros(3, 4, 128)},
            "layers.1.attn_hc.streams: found 3, expected 21 rows as in this engine",
        ),
        (
            "--reference",
            {"layers.1.attn.kv": torch.zeros(21, 10)},
            "layers.1.attn.kv: found [21, 10], expected [21, ",
        ),
        (
            "--reference",
            {"layers.1.router.weights": torch.zeros(21, 1)},
            "layers.1.router.weights: found [21, 1], expected [21, ",
        ),
    ],
)
def test_a_trace_of_another_model_is_one_line(
    model: Path,
    trace_file: Path,
    tmp_path: Path,
    flag: str,
    changed: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture,
) -> None:
    tensors = {name: torch.as_tensor(value) for name, value in changed.items()}
    path = write(tmp_path / "a.safetensors", {**load_file(trace_file), **tensors})
    arguments = ["--device", "cpu", "--model", str(model), "--layers", "1", flag, str(path)]
    if flag == "--reference":
        arguments += ["--input", "reference"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert f"error: {path}: {message}" in error
    assert error.count("\n") == 1


def reference_of(model: Path, trace_file: Path, value: str) -> tuple[Path, list[str]]:
    """A trace with ``value`` alone, and the arguments that compare layer 1 with it."""
    whole = load_file(trace_file)
    kept = {name: whole[name] for name in ("token_ids", value)}
    path = write(model.parent / f"{value}.safetensors", kept, len(TOKENS))
    flags = ["--device", "cpu", "--model", str(model), "--layers", "1"]
    return path, [*flags, "--reference", str(path), "--input", str(trace_file)]


def test_a_reference_may_have_choices_only(
    model: Path, trace_file: Path, capsys: pytest.CaptureFixture
) -> None:
    _, arguments = reference_of(model, trace_file, "layers.1.router.experts")
    assert main(arguments) == 0
    assert "  router.experts 1.0000\n" in capsys.readouterr().out


def test_values_of_one_side_are_listed(
    model: Path, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    values = {**load_file(trace_file), "layers.1.mine": torch.zeros(21, 2)}
    del values["layers.1.router.experts"]
    path = str(write(tmp_path / "a.safetensors", values))
    files = ["--reference", path, "--input", str(trace_file), "--json", str(tmp_path / "a.json")]
    assert main(["--device", "cpu", "--model", str(model), "--layers", "1:3", *files]) == 0
    out = capsys.readouterr().out
    only = "or without its ids: layers"
    assert f"only in ours, {only}.1.router.experts, layers.1.router.weights\n" in out
    assert f"only in theirs, {only}.1.router.weights, layers.*.mine\n" in out
    first, second = json.loads((tmp_path / "a.json").read_text())["layers"]
    assert first["only_theirs"] == ["layers.1.router.weights", "layers.1.mine"]
    assert (second["only_ours"], second["only_theirs"]) == ([], [])


def test_the_column_of_the_streams_holds_no_other_value(
    model: Path, trace_file: Path, capsys: pytest.CaptureFixture
) -> None:
    _, arguments = reference_of(model, trace_file, "layers.1.attn.kv")
    assert main([*arguments, "--chunk", "8"]) == 0
    columns = f"1     {'CSA hash':<9} {8:>5}  {'':<10}  attn.kv 1.00000000\n"
    assert columns in capsys.readouterr().out


def test_a_reference_without_a_common_value_is_one_line(
    model: Path, trace_file: Path, capsys: pytest.CaptureFixture
) -> None:
    path, arguments = reference_of(model, trace_file, "layers.1.router.weights")
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {path}: found no value of layer 1\n"


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (0, "layers.0.attn_hc.streams"),
        (1, "layers.1.attn_hc.streams or layers.0.streams"),
    ],
)
def test_a_trace_without_what_enters_a_layer_is_one_line(
    layer: int, expected: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = write(tmp_path / "a.safetensors", {"logits": torch.zeros(6, 8)})
    arguments = ["--device", "cpu", "--model", str(model), "--layers", str(layer)]
    assert main([*arguments, "--input", str(path)]) == 2
    found = f"found no streams that enter layer {layer}, expected {expected}"
    assert capsys.readouterr().err == f"error: {path}: {found}\n"


@pytest.mark.slow
def test_every_length_of_a_step_reads_the_same_caches(model: Path) -> None:
    source = StoredLayers(model)
    exact = EngineConfig(device="cpu", kv_dtype="bf16", compute_dtype="float32")
    side = EngineLayers(source, exact, TORCH_TABLE, [torch.device("cpu")])
    shape = (9, source.config.hc_mult, source.config.hidden_size)
    given = Given(TOKENS[:9], torch.randn(shape, generator=torch.Generator().manual_seed(1)), 300)
    for layer in range(LAYERS):
        name = f"layers.{layer}.streams"
        one, all_at_once = (side.load(layer).run(given, chunk)[name] for chunk in (1, 9))
        torch.testing.assert_close(one, all_at_once, rtol=0, atol=1e-4)
        alone = side.load(layer).run(given._replace(position=0), 9)[name]
        assert not torch.allclose(alone, all_at_once, atol=1e-2)


@pytest.mark.slow
def test_layers_of_transformers_as_reference() -> None:
    exact = ["--kv-dtype", "bf16", "--compute-dtype", "float32", "--threshold", "0.9999999"]
    length = ["--tokens", "140", "--layers", "1:4"]
    assert main(["--device", "cpu", "--reference", "transformers", *exact, *length]) == 0
