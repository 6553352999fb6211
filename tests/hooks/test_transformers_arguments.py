"""The arguments of the transformers hook: what is wrong with them is one line, and shows before the
model is loaded.
"""

import os
from argparse import Namespace
from pathlib import Path

import pytest

from dsv4.demo import CHECKPOINT
from tests.hooks.loading import config_folder, load_hook

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "out", "ids", "line"),
    [
        (CHECKPOINT, "none/out.safetensors", "[1]", "none/out.safetensors: its folder does not"),
        (CHECKPOINT, CHECKPOINT / "out.safetensors", "[1]", "found in the folder of MODEL"),
        ("none", "out.safetensors", "[1]", "No such file or directory: 'none/config.json'"),
        (CHECKPOINT, "out.safetensors", "1 2", "ids.json: expected a JSON list of at least one id"),
        (CHECKPOINT, "out.safetensors", "[]", "ids.json: expected a JSON list of at least one id"),
        (CHECKPOINT, "out.safetensors", "[1, 2.5]", "ids.json: expected a JSON list of at least"),
        (CHECKPOINT, "out.safetensors", "[2560]", "ids.json: expected a JSON list of at least one"),
        (CHECKPOINT, "./ids.json", "[1]", "ids.json: found the file of --token-ids, expected"),
        (CHECKPOINT, "out.safetensors", "[\udcff]", "ids.json: expected a JSON list of at least"),
        (CHECKPOINT, "out.safetensors", None, "--prompt: found no token, expected text"),
    ],
)
def test_a_wrong_argument_is_named_before_the_model_is_loaded(
    model: Path | str,
    out: Path | str,
    ids: str | None,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    hook = load_hook("transformers_trace", monkeypatch)
    monkeypatch.delattr(hook, "DeepseekV4ForCausalLM")
    what = ["--prompt", ""]
    if ids is not None:
        Path("ids.json").write_bytes(os.fsencode(ids))
        what = ["--token-ids", "ids.json"]
    with pytest.raises(SystemExit) as ended:
        hook.main([str(model), str(out), *what])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert line in last


def test_a_configuration_without_a_vocabulary_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    model = config_folder(tmp_path / "model", "{}")
    hook = load_hook("transformers_trace", monkeypatch)
    with pytest.raises(SystemExit):
        hook.main([str(model), str(tmp_path / "out.safetensors"), "--prompt", "a"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{model}/config.json: vocab_size: found None, expected an integer" in last


def test_a_byte_order_mark_is_no_part_of_the_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = load_hook("transformers_trace", monkeypatch)
    file = tmp_path / "ids.json"
    file.write_text("[3, 4]", encoding="utf-8-sig")
    options = Namespace(prompt=None, out=tmp_path / "out.safetensors", token_ids=file)
    assert hook.read_ids(options, 9) == [3, 4]


def test_a_prompt_that_is_no_utf_8_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    hook = load_hook("transformers_trace", monkeypatch)
    with pytest.raises(SystemExit):
        hook.main([str(CHECKPOINT), str(tmp_path / "out.safetensors"), "--prompt", "a\udcff"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "--prompt: found bytes that are no UTF-8, expected text" in last


@pytest.mark.parametrize("text", ["", "[]", '{"version": "1.0"}', "{}\udcff"])
def test_a_damaged_tokenizer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, text: str
) -> None:
    model = config_folder(tmp_path / "model", '{"vocab_size": 9}')
    (model / "tokenizer.json").write_bytes(os.fsencode(text))
    hook = load_hook("transformers_trace", monkeypatch)
    with pytest.raises(SystemExit):
        hook.main([str(model), str(tmp_path / "out.safetensors"), "--prompt", "a"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{model}/tokenizer.json: found no tokenizer (" in last
