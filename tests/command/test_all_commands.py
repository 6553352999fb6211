"""Bad input to any command: one line and exit code 2, before anything long begins."""

import errno
import io
from collections.abc import Callable

import pytest
import torch

import dsv4.bench.__main__ as bench
from dsv4.bench import plot
from dsv4.checkpoint import export
from dsv4.demo import CHECKPOINT
from dsv4.demo.training import activation_modes, evaluate
from dsv4.validate import blackwell_report, cosine, exchange, graph_readiness, harness, layers

MAINS = {
    "bench": bench.main,
    "plot": plot.main,
    "export": export.main,
    "evaluate": evaluate.main,
    "activation_modes": activation_modes.main,
    "cosine": cosine.main,
    "layers": layers.main,
    "graph_readiness": graph_readiness.main,
    "exchange": exchange.main,
    "blackwell_report": blackwell_report.main,
    "fire_b200_test": harness.main,
}


@pytest.mark.parametrize("command", MAINS)
def test_an_unknown_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert MAINS[command](["--nonsense"]) == 2
    assert_one_line(capsys)


class Full(io.StringIO):
    """In the place of stdout."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("command", MAINS)
def test_a_help_that_stdout_does_not_take(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", Full())
    assert MAINS[command](["--help"]) == 2
    assert assert_one_line(capsys) == "error: stdout: No space left on device\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("evaluate --model /nonexistent", "/nonexistent: no such folder"),
        ("evaluate --cuda-graph full", "--cuda-graph full: found no CUDA device"),
        ("evaluate --gpus 2", "--gpus: found 2"),
        ("evaluate --limit 0", "--limit: found '0', expected an integer from 1"),
        ("evaluate --json /nonexistent/x", "--json: /nonexistent/x: its folder does not exist"),
        ("activation_modes --json /nonexistent/x", "--json: /nonexistent/x: its folder does not"),
        ("cosine --random-tokens -1", "--random-tokens: found '-1'"),
        ("cosine --cuda-graph full --device cpu", "--cuda-graph full: found no CUDA device"),
        ("cosine --json /nonexistent/x", "--json: /nonexistent/x: its folder does not exist"),
        ("cosine --svg /nonexistent/x", "--svg: /nonexistent/x: its folder does not exist"),
        ("cosine --prompt a --random-tokens 2", "--prompt: found together with --random-tokens"),
        ("cosine --reference transformers --reference-device cuda", "--reference-device: found"),
        ("cosine --parallel tensor --swap moe=torch", "--swap: found 'moe=torch' with --parallel"),
        ("layers --json /nonexistent/x", "--json: /nonexistent/x: its folder does not exist"),
        ("layers --layers 7", "--layers: found '7', expected A:B"),
        ("bench engine --decode-tokens 0", "--decode-tokens: found '0'"),
        ("bench engine --repeats 0", "--repeats: found '0'"),
        ("bench engine --out /nonexistent/x", "--out: /nonexistent/x: its folder does not exist"),
        ("graph_readiness --static-only --gpus 2", "--gpus: found together with --static-only"),
        ("graph_readiness --static-only --json /", "--json: /: found a folder"),
        ("exchange --gpus 2", "--device cuda: found no CUDA device"),
        ("exchange --gpus 3", "--gpus: invalid choice: 3"),
        ("exchange --width 7", "--width: found 7, expected an even number"),
        ("exchange --json /nonexistent/x", "--json: /nonexistent/x: its folder does not exist"),
        ("blackwell_report --json /nonexistent/x", "--json: /nonexistent/x: its folder does not"),
        ("fire_b200_test dsv4 n /dev/full", "LOG: /dev/full: cannot be written (No space left"),
        ("plot /nonexistent", "/nonexistent: No such file or directory"),
        (f"export {CHECKPOINT} /proc/x --format bf16", "/proc"),
    ],
)
def test_bad_input(
    line: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    command, *arguments = line.split()
    main: Callable[[list[str]], int] = MAINS[command]
    assert main(arguments) == 2
    assert f"error: {message}" in assert_one_line(capsys)


def assert_one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err
