"""Conversion between layouts and dialects: bitwise where nothing changes, exact where it can be,
never half written.
"""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint import Dialect, Layout, open_checkpoint, tiny_config, write_synthetic
from dsv4.checkpoint.export import export, main
from dsv4.checkpoint.shard import read_header
from dsv4.checkpoint.writer import OutputTensor, write_shards
from dsv4.errors import UserError
from dsv4.weights.quant import QuantTensor
from tests.checkpoint.folders import (
    Tensors,
    as_bytes,
    changed_copy,
    load,
    matrix,
    read_tensors,
    same_tensors,
)

pytestmark = pytest.mark.slow

LAYOUTS: list[Layout] = ["nvfp4-experts", "nvfp4-all", "native", "bf16"]


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


@pytest.fixture
def source(layout: Layout, request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(layout.replace("-", "_"))


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_equal_layout_is_bitwise_for_every_tensor(
    source: Path, layout: Layout, tmp_path: Path
) -> None:
    export(source, tmp_path / "x", layout, Dialect.NATIVE, shard_bytes=300_000)
    assert len(list((tmp_path / "x").glob("model-*-of-*.safetensors"))) > 3
    assert same_tensors(read_tensors(tmp_path / "x"), read_tensors(source))
    assert config(tmp_path / "x") == config(source)


def test_declarations_stay_where_no_format_changes(nvfp4_experts: Path, tmp_path: Path) -> None:
    declared = {**config(nvfp4_experts)["quantization_config"], "producer": {"name": "another"}}
    source = changed_copy(nvfp4_experts, tmp_path / "a", config={"quantization_config": declared})
    export(source, tmp_path / "b", "nvfp4-experts", Dialect.NATIVE)
    assert config(tmp_path / "b") == config(source)


def test_hf_names_and_back_is_bitwise_for_every_tensor(
    source: Path, layout: Layout, tmp_path: Path
) -> None:
    export(source, tmp_path / "hf", layout, Dialect.HF)
    assert any(".self_attn." in name for name in read_tensors(tmp_path / "hf"))
    export(tmp_path / "hf", tmp_path / "back", layout, Dialect.NATIVE)
    assert same_tensors(read_tensors(tmp_path / "back"), read_tensors(source))
    assert config(tmp_path / "back") == config(source)


@pytest.mark.slow
@pytest.mark.parametrize("target", LAYOUTS)
def test_values_survive_every_conversion_as_well_as_the_target_allows(
    source: Path, layout: Layout, target: Layout, tmp_path: Path
) -> None:
    export(source, tmp_path / "x", target, Dialect.HF)
    before = load(source, mtp="classic")
    after = load(tmp_path / "x", mtp="classic")
    # Half of the largest relative step: E2M1 1/6, E4M3 1/16, bfloat16 1/256; two quantisations at
    # most meet.
    bound = {"bf16": 2**-8}.get(target, 0.15) if target != layout else 0.0
    for name, weight in before.items():
        if isinstance(weight, QuantTensor):
            values = weight.dequantize()
            error = (matrix(after, name).dequantize() - values).norm() / values.norm()
            assert float(error) <= bound, name
        else:
            assert as_bytes(after[name]) == as_bytes(weight), name


def test_nvidia_declarations(native: Path, tmp_path: Path) -> None:
    export(native, tmp_path / "x", "nvfp4-experts", Dialect.NATIVE)
    declared = config(tmp_path / "x")["quantization_config"]
    assert declared["quant_method"] == "fp8"
    assert declared["quant_algo"] == "MIXED_PRECISION"
    assert declared["moe_quant_algo"] == "NVFP4"
    assert declared["weight_block_size"] == [128, 128]
    assert declared["quantized_layers"]["layers.3.ffn.experts"] == {
        "quant_algo": "NVFP4",
        "group_size": 16,
    }
    assert declared["ignore"] == ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]
    separate = json.loads((tmp_path / "x/hf_quant_config.json").read_text())
    assert separate["quantization"]["exclude_modules"] == declared["ignore"]
    assert separate["quantization"]["quantized_layers"] == declared["quantized_layers"]


def test_unquantised_export_declares_nothing(nvfp4_experts: Path, tmp_path: Path) -> None:
    export(nvfp4_experts, tmp_path / "x", "bf16", Dialect.NATIVE)
    assert {"quantization_config", "expert_dtype"}.isdisjoint(config(tmp_path / "x"))
    assert not (tmp_path / "x/hf_quant_config.json").exists()


def test_other_files_come_along_but_nothing_from_outside(bf16: Path, tmp_path: Path) -> None:
    folder = changed_copy(bf16, tmp_path / "a")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "encoding/sub").mkdir(parents=True)
    (folder / "encoding/sub/x.py").write_text("x = 1")
    (folder / "notes.bin").write_bytes(b"1")
    (folder / "old.json").mkdir()
    export(folder, tmp_path / "b", "native", Dialect.NATIVE)
    names = {
        str(file.relative_to(tmp_path / "b"))
        for file in (tmp_path / "b").rglob("*")
        if file.is_file()
    }
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "encoding/sub/x.py"}
    (tmp_path / "secret.json").write_text("secret")
    (folder / "generation_config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(UserError, match="outside the folder"):
        export(folder, tmp_path / "c", "native", Dialect.NATIVE)


def test_nothing_is_left_behind_when_an_export_fails(bf16: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="mtp.0.ffn.experts.7.w3.weight: found inf at"):
        export(
            changed_copy(bf16, tmp_path / "b", damage_last_expert),
            tmp_path / "out/x",
            "native",
            Dialect.NATIVE,
        )
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("norm.weight", float("nan"), "1 not finite: norm.weight"),
        ("layers.3.ffn.gate.bias", float("inf"), "1 not finite: layers.3.ffn.gate.bias"),
        ("layers.0.ffn.gate.tid2eid", -1, r"tid2eid \(found expert ids -1 to 7, expected 0 to 7"),
        ("layers.2.ffn.experts.3.w1.input_scale", float("nan"), "w1.input_scale: found nan"),
    ],
)
def test_what_cannot_be_loaded_is_not_written(
    nvfp4_experts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: float,
    message: str,
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[name].view(-1)[0] = value

    folder = changed_copy(nvfp4_experts, tmp_path / "a", edit)
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("dsv4.checkpoint.export.write_json", pytest.fail)
    with pytest.raises(UserError, match=message):
        export(folder, tmp_path / "out/x", "nvfp4-experts", Dialect.NATIVE)
    assert list((tmp_path / "out").iterdir()) == []


def damage_last_expert(tensors: Tensors) -> None:
    tensors["mtp.0.ffn.experts.7.w3.weight"][-1, -1] = float("inf")


def test_existing_destination_is_never_touched(bf16: Path, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError, match="already exists"):
        export(bf16, tmp_path / "x", "native", Dialect.NATIVE)
    with pytest.raises(UserError, match="no such folder"):
        export(bf16, tmp_path / "no/x", "native", Dialect.NATIVE)
    assert list((tmp_path / "x").iterdir()) == []


def test_command_line(bf16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        str(bf16),
        str(tmp_path / "x"),
        "--format",
        "nvfp4-experts",
        "--names",
        "hf",
        "--shard-size",
        "200kb",
    ]
    assert main(arguments) == 0
    index = json.loads((tmp_path / "x/model.safetensors.index.json").read_text())
    tensors = read_tensors(tmp_path / "x")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_command_line_draws_a_bar_on_a_terminal_alone(
    bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, is_terminal in (("a", True), ("b", False)):
        stderr = io.StringIO()
        monkeypatch.setattr(stderr, "isatty", lambda found=is_terminal: found)
        monkeypatch.setattr("sys.stderr", stderr)
        assert main([str(bf16), str(tmp_path / name), "--format", "bf16"]) == 0
        assert ("export" in stderr.getvalue()) == is_terminal


@pytest.mark.parametrize("size", ["0", "-1", "5XB", "", "1e9"])
def test_command_line_refuses_sizes_that_are_none(bf16: Path, tmp_path: Path, size: str) -> None:
    arguments = [str(bf16), str(tmp_path / "x"), "--format", "native", f"--shard-size={size}"]
    assert main(arguments) == 2


def test_dspark_modules_come_along(tmp_path: Path) -> None:
    dspark = {
        "block_size": 5,
        "noise_token_id": 200,
        "target_layer_ids": [1, 2, 3],
        "markov_rank": 32,
    }
    raw = tiny_config(
        compress_ratios=[0, 4, 128, 4, 0, 0, 0], **{f"dspark_{k}": v for k, v in dspark.items()}
    )
    write_synthetic(tmp_path / "a", raw, "native", 1, mtp="dspark")
    export(tmp_path / "a", tmp_path / "b", "native", Dialect.HF)
    export(tmp_path / "b", tmp_path / "c", "native", Dialect.NATIVE)
    assert same_tensors(read_tensors(tmp_path / "c"), read_tensors(tmp_path / "a"))


def test_written_tensors_are_aligned_in_any_order(tmp_path: Path) -> None:
    def one(name: str, tensor: Tensor) -> OutputTensor:
        return OutputTensor(name, tensor.dtype, tuple(tensor.shape), lambda: [tensor])

    tensors = {
        "a": torch.tensor([7], dtype=torch.uint8),
        "b": torch.arange(3),
        "c": torch.tensor(0.5),
    }
    tensors["d"] = torch.arange(6).view(2, 3).t().bfloat16()
    write_shards(tmp_path, [one(name, tensor) for name, tensor in tensors.items()])
    assert same_tensors(
        read_tensors(tmp_path), {name: tensor.contiguous() for name, tensor in tensors.items()}
    )
    for stored in read_header(tmp_path / "model.safetensors").values():
        assert stored.offset % stored.dtype.itemsize == 0


def test_open_checkpoint_accepts_what_was_exported(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "x", "bf16", Dialect.HF)
    assert not open_checkpoint(tmp_path / "x").problems


@pytest.mark.slow
def test_sigterm_leaves_nothing_of_an_export(bf16: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time; from dsv4.checkpoint import export, writer\n"
        "from dsv4.command.program import run_program\n"
        # A signal that comes just before a sleep begins is handled behind it.
        "naps = lambda: [time.sleep(0.05) for _ in range(1200)]\n"
        "export.write_shards = lambda *_, **__: (print('ready', flush=True), naps())\n"
        "run_program(lambda: export.main(sys.argv[1:]))"
    )
    arguments = [str(bf16), str(tmp_path / "x"), "--format", "native"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    unfinished = [path.name for path in tmp_path.iterdir() if path.name.startswith(".x.")]
    assert len(unfinished) == 1
    process.terminate()
    assert process.communicate()[1] == "ended by SIGTERM\n"
    assert process.returncode == 143
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".x.")] == []
