"""The cosine validator: table, exit codes, swaps, JSON and SVG."""

import errno
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.config import ModelConfig
from dsv4.demo import CHECKPOINT
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.ops import TORCH
from dsv4.ops.tables import CUDA_TABLE, TORCH_TABLE, RecordedTable, swap_ops
from dsv4.validate import cosine, layers, traces
from dsv4.validate.cosine import main
from tests.model.tiny import direct, raw_config
from tests.validate.trace_files import random, write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tokens", "count", "threshold"),
    [
        ("float32", ["--random-tokens", "12"], 12, "0.999999"),
        ("bfloat16", ["--prompt", "was blue green count France reverse of"], 8, "0.999"),
    ],
    ids=["float32", "bfloat16"],
)
def test_the_torch_ops_agree_with_themselves_fed_in_other_chunks(
    dtype: str, tokens: list[str], count: int, threshold: str, tmp_path: Path
) -> None:
    """No choice of experts is a near tie that another CPU decides otherwise. The closest two are
    3e-4 of the largest score apart for the random tokens, where rounding to float32 moves a score
    by less than 1e-6, and 1e-2 for the text, where rounding to bfloat16 moves one by 5e-3.
    """
    json_file = tmp_path / "cosine.json"
    svg_file = tmp_path / "cosine.svg"
    common = ["--device", "cpu", *tokens, "--compute-dtype", dtype, "--threshold", threshold]
    assert main([*common, "--chunk", "5", "--json", str(json_file), "--svg", str(svg_file)]) == 0
    written = json.loads(json_file.read_text())
    assert [row["name"] for row in written["rows"][-2:]] == ["final", "logits"]
    assert written["tokens"] == count
    assert "dsv4.validate.cosine --device cpu" in written["command"]
    assert svg_file.read_text().count("<title>") == len(written["rows"])


def test_a_wrong_op_is_found_under_the_threshold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Both sides are the torch ops; the first engine's attention has the wrong sign."""
    broken = replace(TORCH, sparse_attention=lambda *arguments: -TORCH.sparse_attention(*arguments))
    tables = iter((direct(broken), TORCH_TABLE))
    monkeypatch.setattr(traces, "swap_ops", lambda table, swaps: next(tables))
    assert main(["--device", "cpu", "--random-tokens", "9"]) == 1
    assert "under the threshold" in capsys.readouterr().out


def test_one_large_token_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cosine over all tokens is above the threshold, 31 of 32 tokens are unrelated."""
    sides = [torch.randn(32, 4, 16, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    sides[1][0] = sides[0][0]
    for side in sides:
        side[0] *= 3000
    found = iter(
        ({"layers": [side], "final": sides[0][:, 0], "logits": sides[0][:, 0]}, ["SWA"])
        for side in sides
    )
    monkeypatch.setattr(cosine, "engine_trace", lambda *arguments: next(found))
    assert main(["--random-tokens", "32", "--threshold", "0.99"]) == 1


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        ("moe", "found 'moe', expected OP=torch or OP=cuda"),
        ("mo=torch", "found op 'mo', expected one of embed, gather_logits, grouped_linear"),
        ("moe=cuda", "found moe=cuda in the torch ops"),
    ],
)
def test_a_wrong_swap_is_one_line(swap: str, message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["--device", "cpu", "--model", str(CHECKPOINT), "--swap", swap]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --swap: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prompt", "a\udcff"],
            "--prompt: found a lone surrogate at character 1, expected valid",
        ),
        (
            ["--prompt", "a", "--random-tokens", "3"],
            "--prompt: found together with --random-tokens",
        ),
        (
            ["--reference", "transformers", "--reference-device", "auto"],
            "--reference-device: found with transformers, which runs on the CPU",
        ),
        (["--parallel", "tensor", "--swap", "moe=torch"], "--swap: found 'moe=torch' with --par"),
        (["--prompt", ""], "--prompt: found 0 tokens, expected 1 to 8192 (max_position"),
        (["--random-tokens", "8193"], "--random-tokens: found 8193 tokens, expected 1 to 8192"),
        (["--random-tokens", "9" * 18], f"--random-tokens: found {'9' * 18} tokens, expected 1 to"),
        (["--chunk", "16385"], "--chunk: found '16385', expected an integer from 1 to 16384"),
        (["--json", "out", "--svg", "./out"], "--svg: out: found the file of --json, expected"),
        (["--json", "out", "--svg", "link"], "--svg: link: found the file of --json, expected"),
        (["--model", ".", "--json", "config.json"], "config.json: found the file of --model"),
        (["--against", "a", "b", "--json", "./b"], "--json: b: found the file of --against"),
    ],
)
def test_other_wrong_flags_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("out")
    assert main(["--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_flags_reach_both_sides_and_the_choices_of_tokens_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    given: list[tuple[EngineConfig, dict[str, str]]] = []

    def trace(_: Path, ids: list[int], config: EngineConfig, swaps: dict[str, str]) -> Any:
        """The last token's largest logit is another one on either side."""
        given.append((config, swaps))
        last = torch.tensor([1.0, 1.0001] if len(given) == 1 else [1.0001, 1.0])
        logits = torch.stack([torch.tensor([1.0, 2.0])] * (len(ids) - 1) + [last])
        return {"layers": [logits], "final": logits, "logits": logits}, ["SWA"]

    monkeypatch.setattr(cosine, "engine_trace", trace)
    ours = ["--device", "cuda", "--gpus", "2", "--chunk", "7", "--swap", "moe=torch"]
    modes = ["--cuda-graph", "full", "--prefill-activations", "fp8"]
    shared = ["--kv-dtype", "bf16", "--compute-dtype", "float32", "--random-tokens", "3"]
    written = tmp_path / "out.json"
    assert main([*ours, *modes, *shared, "--json", str(written)]) == 0
    common = EngineConfig(
        kv_dtype="bf16", compute_dtype="float32", max_context=3, draft="off", cuda_graph=None
    )
    assert given == [
        (
            replace(
                common,
                device="cuda",
                gpus=2,
                prefill_chunk=7,
                cuda_graph="full",
                prefill_activations="fp8",
            ),
            {"moe": "torch"},
        ),
        (replace(common, device="cpu", ops="torch", prefill_chunk=512), {}),
    ]
    assert capsys.readouterr().out.endswith("same argmax at every token: no\n")
    assert json.loads(written.read_text())["same_argmax_at_every_token"] is False


@pytest.mark.parametrize(
    ("mode", "prompt_tokens"), [(None, None), ("auto", None), ("split", 0), ("full", 0)]
)
def test_only_replayed_steps_take_the_tokens_one_by_one(
    monkeypatch: pytest.MonkeyPatch, mode: Any, prompt_tokens: int | None
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(traces.Engine, "load", lambda *_, **__: None)
    monkeypatch.setattr(traces, "write_trace", lambda *given: asked.append(given))
    config = EngineConfig(device="cuda", cuda_graph=mode)
    traces.write_engine_trace(Path("out"), CHECKPOINT, [1, 2], config, {}, ["hidden"])
    assert asked == [(None, [1, 2], Path("out"), ["hidden"], prompt_tokens, CHECKPOINT.name)]


@pytest.mark.parametrize("with_trace", [False, True])
def test_flags_that_nothing_reads_beside_traces_are_refused(with_trace: bool) -> None:
    given = {"prompt": "a", "random-tokens": "3"}
    given |= {"reference": "transformers", "reference-device": "auto"}
    if with_trace:
        given |= {"model": ".", "device": "cpu", "gpus": "2", "parallel": "tensor"}
        given |= {"ops": "torch", "chunk": "3", "cuda-graph": "full", "swap": "moe=torch"}
        given |= {"kv-dtype": "bf16", "compute-dtype": "float32", "prefill-activations": "fp8"}
    files = ["--against", "a", *(["--trace", "b"] if with_trace else [])]
    for flag, value in given.items():
        with pytest.raises(UserError, match=f"^--{flag}: found with --against"):
            cosine.parse([*files, f"--{flag}", value])


def test_swapping_changes_the_cuda_table_only() -> None:
    assert swap_ops(TORCH_TABLE, {"moe": "torch"}) is TORCH_TABLE
    assert swap_ops(CUDA_TABLE, {"moe": "cuda"}) is CUDA_TABLE
    swapped = swap_ops(CUDA_TABLE, {"moe": "torch"})
    assert isinstance(swapped, RecordedTable)
    assert swapped.exact
    assert swapped.packing is CUDA_TABLE.packing


def test_graphs_without_a_gpu_are_refused_in_one_line(capsys: pytest.CaptureFixture) -> None:
    assert main(["--device", "cpu", "--random-tokens", "9", "--cuda-graph", "full"]) == 2
    expected = "error: --cuda-graph full: found no CUDA device, expected one\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("main", [main, layers.main])
def test_a_reference_without_its_gpu_is_named_by_its_flag(
    main: Callable[[list[str]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["--device", "cpu", "--reference-device", "cuda"]) == 2
    expected = "error: --reference-device cuda: found no CUDA device, expected one\n"
    assert capsys.readouterr().err == expected


@pytest.mark.slow
def test_transformers_as_reference() -> None:
    arguments = [
        "--device",
        "cpu",
        "--reference",
        "transformers",
        "--kv-dtype",
        "bf16",
        "--compute-dtype",
        "float32",
    ]
    assert main([*arguments, "--random-tokens", "20"]) == 0


def test_the_results_are_kept_where_nobody_reads_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    trace = str(
        write(tmp_path / "trace.safetensors", {"hidden": random(6, 16)}, config=raw_config((0, 4)))
    )
    files = [tmp_path / "out.json", tmp_path / "out.svg"]
    written = ["--json", str(files[0]), "--svg", str(files[1])]
    monkeypatch.setattr(sys.stdout, "write", refuse)
    assert main(["--trace", trace, *written, "--against", trace]) == 2
    assert all(file.read_text() for file in files)


def test_a_shape_of_another_model_is_compared_with_the_trace_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = write(tmp_path / "theirs.safetensors", {"hidden": random(6, 16)})
    assert main(["--device", "cpu", "--against", str(theirs)]) == 2
    width = ModelConfig.from_folder(CHECKPOINT).hidden_size
    found = f"found [6, 16], expected [6, {width}] as in the trace of --model"
    assert capsys.readouterr().err == f"error: {theirs}: hidden: {found}\n"
