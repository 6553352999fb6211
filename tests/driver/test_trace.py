"""``--trace`` of the driver."""

import errno
import json
import stat
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.driver.conftest import read_json
from tests.driver.drive import Drive


def test_a_run_leaves_the_values_of_its_prompt_and_its_tokens(drive: Drive, tmp_path: Path) -> None:
    trace = tmp_path / "trace.safetensors"
    report = tmp_path / "run.json"
    arguments = ("--prompt", "Hi", "--max-tokens", "4", "--ignore-eos", "--trace", str(trace))
    result = drive(*arguments, "--json", str(report), "--trace-at", "layers.1.*")
    assert result.code == 0, result.err
    tokens = read_json(report)
    with safe_open(trace, "pt") as file:
        ids = file.get_tensor("token_ids").tolist()
        names = set(file.keys())
        streams_TME = file.get_tensor("layers.1.streams")
        metadata = file.metadata()
    assert ids[-3:] == tokens["completion"]["token_ids"][:3]
    assert len(ids) == int(metadata["prompt_tokens"]) + 3
    assert streams_TME.shape[0] == len(ids)
    assert all(name.startswith("layers.1.") for name in names - {"positions", "token_ids"})
    assert json.loads(metadata["config"])["num_hidden_layers"] > 1


def test_nan_leaves_the_trace_of_the_step_that_met_it(
    drive: Drive, broken_copy: Path, tmp_path: Path
) -> None:
    (shard,) = broken_copy.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["head.weight"][5].fill_(3e38)
    save_file(tensors, shard)
    trace = tmp_path / "trace.safetensors"
    # Kernels add up in another order, in which this row becomes infinity.
    flags = ("--model", broken_copy, "--device", "cpu", "--prompt", "Hi", "--trace-at", "logits")
    found = f"NaN in logits at position 4; --trace: {trace} has the steps up to there"
    drive(*flags, "--trace", trace).assert_user_error(found)
    with safe_open(trace, "pt") as file:
        assert len(file.get_tensor("token_ids")) == 5
        assert file.get_tensor("logits")[4].isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace-at", "logits"), "--trace-at: found without --trace"),
        (("--trace", "x", "--profile"), "--trace: found together with --profile"),
        (("--trace", "x", "--draft", "mtp"), "--draft: found together with --trace"),
        (("--trace", "x", "--draft-tokens", 2), "--draft-tokens: found together with --trace"),
        (("--trace", "-"), "--trace: -: found no regular file"),
        (("--trace", "/dev/null"), "--trace: /dev/null: found no regular file"),
        (("--trace", "/nonexistent/x"), "--trace: /nonexistent/x: its folder does not exist"),
        (("--trace", "x", "--trace-at", "layer.3"), "--trace-at: 'layer.3' matches no value"),
    ],
    ids=[
        *("without a file", "profile", "draft", "draft tokens"),
        *("stdout", "device", "folder", "pattern"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_loading(
    drive: Drive, arguments: tuple[str, ...], message: str
) -> None:
    drive(*arguments).assert_user_error(message)


def test_room_is_asked_for_tokens_that_fit_into_the_context(drive: Drive, tmp_path: Path) -> None:
    flags = ("--prompt", "Hi", "--max-context", 16, "--max-tokens", 10**20, "--ignore-eos")
    result = drive(*flags, "--trace", tmp_path / "trace", "--trace-at", "logits")
    assert result.code == 0, result.err
    assert (tmp_path / "trace").is_file()


def test_an_older_trace_leaves_its_mode(drive: Drive, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.touch(0o600)
    assert drive("--prompt", "Hi", "--max-tokens", 1, "--trace", trace).code == 0
    assert trace.stat().st_size > 0
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600


def test_a_disk_that_is_full_is_one_line_that_names_the_trace(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dsv4.trace.file._copy", full)
    result = drive("--prompt", "Hi", "--max-tokens", 1, "--trace", tmp_path / "trace")
    assert result.code == 2
    found = f"error: {tmp_path}/trace: cannot be written (No space left on device)"
    assert result.err.splitlines()[-1] == found
    assert list(tmp_path.iterdir()) == []
