"""``--trace`` of the driver."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace-at", "logits"), "--trace-at: found without --trace"),
        (("--trace", "x", "--profile"), "--trace: found together with --profile"),
        (("--trace", "-"), "--trace: -: found no regular file"),
        (("--trace", "/dev/null"), "--trace: /dev/null: found no regular file"),
        (("--trace", "/nonexistent/x"), "--trace: /nonexistent/x: its folder does not exist"),
        (("--trace", "x", "--trace-at", "layer.3"), "--trace-at: 'layer.3' matches no value"),
    ],
    ids=["without a file", "profile", "stdout", "device", "folder", "pattern"],
)
def test_what_cannot_be_traced_is_refused_before_loading(
    drive: Drive, arguments: tuple[str, ...], message: str
) -> None:
    drive(*arguments).assert_user_error(message)
