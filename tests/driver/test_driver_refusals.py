"""What the driver refuses, in this process: one line on stderr and exit code 2."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dsv4.cli.stream import PlainPrinter
from tests.driver.conftest import read_json
from tests.driver.drive import Drive
from tests.source_rules import ROOT


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--max-tokens", "-1"], ["--max-tokens", "'-1'", "from 1"]),
        (["--max-tokens", "many"], ["--max-tokens", "'many'"]),
        (["--temperature", "-0.1"], ["--temperature", "'-0.1'"]),
        (["--temperature", "nan"], ["--temperature", "'nan'"]),
        (["--top-p", "0"], ["--top-p", "above 0"]),
        (["--top-p", "1.5"], ["--top-p", "'1.5'"]),
        (["--min-p", "2"], ["--min-p", "'2'"]),
        (["--seed", "-1"], ["--seed", "'-1'"]),
        (["--top-k", "-1"], ["--top-k", "'-1'"]),
        (["--gpus", "9"], ["--gpus", "'9'", "to 8"]),
        (["--prefill-chunk", "0"], ["--prefill-chunk", "'0'"]),
        (["--max-context", "0"], ["--max-context", "'0'"]),
        (["--device", "tpu"], ["--device", "'tpu'"]),
        (["--kv-dtype", "fp4"], ["--kv-dtype", "'fp4'"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--prom", "x"], ["--prom"]),
        (["--prompt", "a", "--prompt-file", "b"], ["--prompt-file", "--prompt"]),
        (["--prompt-file", "-", "--tools", "-"], ["--tools: found stdin together with --prompt-f"]),
        (["--raw", "--system", "x"], ["--raw", "--system"]),
        (["--raw", "--thinking", "on"], ["--raw", "--thinking on"]),
        (["--reasoning-effort", "max"], ["--reasoning-effort", "--thinking on"]),
        (["--json", "/no/such/folder/x.json"], ["--json", "/no/such/folder/x.json"]),
        (["--json", "/"], ["--json", "folder"]),
        (["--prompt-file", "/no/such/file"], ["--prompt-file", "/no/such/file"]),
        (["--messages", "/no/such/file"], ["--messages", "/no/such/file"]),
        (["--model", "/no/such/folder"], ["--model", "/no/such/folder"]),
        (
            ["--model", "deepseek-ai/Some-V4"],
            ["deepseek-ai/Some-V4: no such", "hf download deepseek-ai/Some-V4 --local-dir Some-V4"],
        ),
        (["--compute-dtype", "fp16"], ["--compute-dtype", "'fp16'"]),
        (["--compute-dtype", "float32", "--ops", "cuda"], ["--ops", "float32"]),
        (["--index-dtype", "fp4"], ["--index-dtype", "'fp4'"]),
        (["--cuda-graph", "--device", "cpu"], ["--cuda-graph", "no CUDA device"]),
        (["--cuda-graph", "split", "--device", "cpu"], ["--cuda-graph split", "no CUDA device"]),
        (["--cuda-graph", "half"], ["--cuda-graph", "'half'"]),
        (["--prompt", "\ud800"], ["prompt", "Unicode"]),
        (["--device", "cpu", "--gpus", "2"], ["gpus"]),
        (["--max-tokens", "1_000"], ["--max-tokens", "'1_000'"]),
        (["--model", ""], ["--model", "''"]),
        (["--plan", "--seed", "1"], ["--seed", "--plan"]),
        (["--plan", "--profile"], ["--profile", "--plan"]),
        (["--plan", "--ignore-eos"], ["--ignore-eos", "--plan"]),
        (["--plan", "--trace", "x"], ["--trace", "--plan"]),
        (["--stop", "\udcff"], ["--stop", "not UTF-8"]),
        (["--parallel", "round-robin"], ["--parallel", "one device", "--gpus"]),
        (
            ["--parallel", "tensor", "--gpus", "3"],
            ["--gpus", "found 3 with --parallel tensor", "2, 4, 8"],
        ),
        (["--quiet", "--profile"], ["--profile", "--quiet", "--json"]),
        (["--temperature", "0", "--seed", "1"], ["--seed", "greedy", "--temperature"]),
        (["--temperature", "0", "--top-p", "0.5"], ["--top-p", "greedy"]),
        (["--temperature", "0", "--top-k", "5"], ["--top-k", "greedy"]),
        (["--temperature", "0", "--min-p", "0.5"], ["--min-p", "greedy"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_flags_are_one_line_and_exit_code_2(
    drive: Drive, flags: list[str], parts: list[str]
) -> None:
    drive(*flags).assert_user_error(*parts)


@pytest.mark.parametrize(
    ("file", "text", "parts"),
    [
        ("config.json", None, ["config.json"]),
        ("config.json", "{", ["config.json"]),
        (
            "config.json",
            '{"model_type": "deepseek_v41"}',
            ["config.json", "model_type", "deepseek_v41"],
        ),
        ("tokenizer.json", None, ["tokenizer.json"]),
        ("tokenizer.json", "{}", ["tokenizer.json"]),
        ("generation_config.json", "[]", ["copy/generation_config.json: "]),
        (
            "generation_config.json",
            '{"temperature": "hot"}',
            ["copy/generation_config.json: ", "temperature", "'hot'"],
        ),
        (
            "generation_config.json",
            '{"top_k": 2.5}',
            ["copy/generation_config.json: ", "top_k", "2.5"],
        ),
        (
            "generation_config.json",
            '{"eos_token_id": -4}',
            ["copy/generation_config.json: ", "eos_token_id", "-4"],
        ),
        (
            "generation_config.json",
            '{"eos_token_id": true}',
            ["copy/generation_config.json: ", "eos_token_id", "True"],
        ),
        (
            "generation_config.json",
            f'{{"temperature": 1{"0" * 400}}}',
            ["copy/generation_config.json: ", "temperature", "a finite number, 0 or more"],
        ),
        (
            "generation_config.json",
            '{"temperature": -1}',
            ["copy/generation_config.json: ", "temperature", "-1"],
        ),
        (
            "generation_config.json",
            '{"do_sample": "false"}',
            ["copy/generation_config.json: ", "do_sample", "'false'", "true or false"],
        ),
        ("model.safetensors", "junk", ["model.safetensors"]),
        ("model.safetensors", None, ["safetensors"]),
    ],
)
def test_damaged_checkpoints_are_one_line_and_exit_code_2(
    drive: Drive, broken_copy: Path, file: str, text: str | None, parts: list[str]
) -> None:
    path = broken_copy / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    drive("--model", broken_copy).assert_user_error(*parts)


def test_sampling_flags_are_refused_where_the_checkpoint_decodes_greedily(
    drive: Drive, broken_copy: Path
) -> None:
    (broken_copy / "generation_config.json").write_text('{"do_sample": false}')
    drive("--model", broken_copy, "--top-p", 0.5).assert_user_error(
        "--top-p", "generation_config.json", "--temperature above 0"
    )
    sampled = drive("--model", broken_copy, "--top-p", 0.5, "--temperature", 1, "--max-tokens", 1)
    assert sampled.code == 0


def test_a_folder_that_cannot_be_listed_is_named(
    drive: Drive, broken_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    drive("--model", broken_copy).assert_user_error(f"{broken_copy}: cannot be listed")


def test_cuda_without_a_gpu_names_the_device(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    drive("--device", "cuda").assert_user_error("--device cuda: found no CUDA device")


def test_tokenizer_of_another_model_is_refused(drive: Drive, broken_copy: Path) -> None:
    config = json.loads((broken_copy / "config.json").read_text())
    (broken_copy / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    drive("--model", broken_copy).assert_user_error("tokenizer.json", "at most 100", "vocab_size")


@pytest.mark.parametrize(
    "text", ["{", '{"messages": 3}', '[{"role": "pirate", "content": "x"}]', "\udcff"]
)
def test_bad_messages_file_is_one_line_and_exit_code_2(
    drive: Drive, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "messages.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    drive("--messages", path).assert_user_error("--messages", "messages.json")


def test_infinity_in_an_indexer_is_one_line(drive: Drive, broken_copy: Path) -> None:
    poisoned = 0
    for shard in broken_copy.glob("*.safetensors"):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            if name.endswith("indexer.weights_proj.weight"):
                tensor.fill_(3e38)
                poisoned += 1
        save_file(tensors, shard)
    assert poisoned
    # Kernels compute no scores as long as all entries are read.
    flags = ("--device", "cpu", "--prompt", "Hello, how are you today?", "--model", broken_copy)
    drive(*flags).assert_user_error("infinity in layers.")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("--json", "--trace"),
        ("--json", "--save-state"),
        ("--trace", "--save-state"),
        ("--prompt-file", "--json"),
    ],
)
def test_a_file_that_two_flags_would_use_is_refused(
    drive: Drive, tmp_path: Path, first: str, second: str
) -> None:
    file = tmp_path / "file"
    file.write_text("Hi")
    link = tmp_path / "link"
    link.symlink_to(file)
    message = f"{second}: {link}: found the file of {first}, expected another one"
    drive(first, file, second, link).assert_user_error(message)
    assert file.read_text() == "Hi"


def test_a_state_that_is_read_is_no_other_output(drive: Drive, tmp_path: Path) -> None:
    message = f"--json: {tmp_path / 's'}: found the file of --load-state, expected another one"
    files = ("--load-state", tmp_path / "s", "--json", tmp_path / "s")
    drive("--prompt", "Hi", *files).assert_user_error(message)


def test_a_file_of_the_model_is_no_output(drive: Drive, broken_copy: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        path = broken_copy / name
        before = path.read_bytes()
        message = f"--json: {path}: found the file of --model, expected another one"
        drive("--prompt", "Hi", "--model", broken_copy, "--json", path).assert_user_error(message)
        assert path.read_bytes() == before


def test_a_device_may_be_two_outputs(drive: Drive) -> None:
    flags = ("--prompt", "Hi", "--max-tokens", 1, "--json", "/dev/null")
    assert drive(*flags, "--prompt-file", "/dev/null").code == 2
    assert drive(*flags).code == 0


def test_a_byte_order_mark_is_no_text(drive: Drive, tmp_path: Path) -> None:
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfHi")
    (tmp_path / "plain").write_bytes(b"Hi")
    flags = ("--max-tokens", 1, "--json", "-", "--quiet")
    ids = [
        json.loads(drive("--prompt-file", tmp_path / name, *flags).out.splitlines()[-1])["prompt"]
        for name in ("marked", "plain")
    ]
    assert ids[0] == ids[1]


def test_an_error_behind_shown_tokens_is_reported_with_them(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = PlainPrinter.feed
    shown: list[str] = []

    def full(printer: PlainPrinter, text: str) -> None:
        shown.append(text)
        if len(shown) == 4:
            raise OSError(errno.ENOSPC, "No space left on device", "stdout")
        feed(printer, text)

    monkeypatch.setattr(PlainPrinter, "feed", full)
    report = tmp_path / "run.json"
    flags = ("--raw", "--prompt", "Hi", "--max-tokens", 20, "--ignore-eos", "--json", report)
    result = drive(*flags)
    assert result.code == 2
    assert result.err == "error: stdout: No space left on device\n"
    told = read_json(report)
    assert told["finish_reason"] == "error"
    assert 0 < len(told["completion"]["token_ids"]) < 20


@pytest.mark.slow
def test_what_stdout_does_not_take_names_it() -> None:
    for flags in (["--quiet", "--prompt", "Hi"], ["--plan"], ["--help"], ["--version"]):
        command = [sys.executable, ROOT / "single_shot_inference.py", *flags]
        with Path("/dev/full").open("wb") as full:
            run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
        assert run.returncode == 2
        assert run.stderr == b"error: stdout: No space left on device\n"
