"""The writer that is copied beside an engine: what its file says of the model, and
that a folder which is none shows before the engine has run.
"""

import os
import re
import stat
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.hooks.loading import config_folder, load_hook, read_joined, stub_distributed
from tests.source_rules import ROOT


def test_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = config_folder(tmp_path / "tiny")
    monkeypatch.chdir(folder)
    writer = load_hook("trace_writer", monkeypatch).TraceWriter("mine", ".")
    writer.begin(torch.tensor([5]), torch.tensor([0]))
    path = writer.save(tmp_path / "theirs.safetensors")
    with safe_open(str(path), framework="pt") as file:
        assert file.metadata()["model"] == "tiny"


def test_a_pass_of_no_tokens_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in front of a sequence nor inside of it does it begin another one."""
    folder = config_folder(tmp_path / "tiny")
    writer = load_hook("trace_writer", monkeypatch).TraceWriter("mine", folder)
    for positions in (torch.arange(0), torch.arange(2), torch.arange(0), torch.arange(2, 3)):
        writer.begin(5 + positions, positions)
        writer.add("hidden", torch.zeros(len(positions), 4))
    assert writer.whole
    with safe_open(str(writer.save(tmp_path / "theirs.safetensors")), framework="pt") as file:
        assert file.get_tensor("token_ids").tolist() == [5, 6, 7]
        assert file.get_tensor("hidden").shape == (3, 4)


def test_a_folder_without_a_configuration_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = load_hook("trace_writer", monkeypatch).TraceWriter
    with pytest.raises(FileNotFoundError, match=r"org/name/config\.json"):
        writer("mine", "org/name")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 4), (1, 5)], r"router.experts: found \[1, 5\], expected .*, as \[2, 4\] before"),
        ([()], r"router.experts: found \[\], expected rows \[T, ...\]"),
    ],
)
def test_rows_that_cannot_be_joined_are_named_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shapes: list[tuple[int, ...]],
    message: str,
) -> None:
    folder = config_folder(tmp_path / "model")
    writer = load_hook("trace_writer", monkeypatch).TraceWriter("mine", folder)
    *before, last = [torch.zeros(shape) for shape in shapes]
    for rows in before:
        writer.add("layers.0.router.experts", rows)
    with pytest.raises(ValueError, match=message):
        writer.add("layers.0.router.experts", last)
    writer.begin(torch.tensor([5]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"logits: found \[\], expected rows"):
        writer.add("logits", torch.tensor(1.0))
    assert writer.save(tmp_path / "theirs.safetensors").is_file()


@pytest.mark.parametrize(("text", "found"), [("{", "no JSON"), ("[]", "a JSON list")])
def test_a_configuration_that_is_no_object_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: str
) -> None:
    folder = config_folder(tmp_path / "model", text)
    writer = load_hook("trace_writer", monkeypatch).TraceWriter
    with pytest.raises(ValueError, match=rf"model/config\.json: found {found}.*, expected"):
        writer("mine", folder)


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("model", "found no regular file, expected a file name"),
        ("pipe", "found no regular file, expected a file name"),
        ("no/theirs.safetensors", "its folder does not exist"),
        ("/proc/theirs.safetensors", r"its folder cannot be written \(No such file"),
        ("model/theirs.safetensors", "found in the folder of MODEL, expected another one"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_file_that_cannot_be_written_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, file: str, problem: str
) -> None:
    stub_distributed(f"{engine}.distributed", 0, 1, monkeypatch)
    stub_distributed("sglang.srt.distributed", 0, 1, monkeypatch)
    hook = load_hook(f"{engine}_trace", monkeypatch)
    model = config_folder(tmp_path / "model")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=rf"{file}: {problem}"):
        hook.install(nn.Module(), str(model), str(tmp_path / file))


def test_the_file_of_a_rank_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = config_folder(tmp_path / "model")
    writer = load_hook("trace_writer", monkeypatch).TraceWriter("mine", model, 1, 2)
    (tmp_path / "theirs.rank1.safetensors").mkdir()
    with pytest.raises(ValueError, match="found no regular file, expected a file name"):
        writer.check(tmp_path / "theirs.safetensors")


def test_a_link_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = config_folder(tmp_path / "model")
    writer = load_hook("trace_writer", monkeypatch).TraceWriter("mine", model)
    writer.begin(torch.tensor([5]), torch.tensor([0]))
    link = tmp_path / "theirs.safetensors"
    link.symlink_to("target.safetensors")
    writer.save(link)
    assert link.is_symlink()
    assert link.is_file()


def test_a_file_has_the_mode_that_new_files_have_or_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = config_folder(tmp_path / "model")
    writer = load_hook("trace_writer", monkeypatch).TraceWriter("mine", model)
    writer.begin(torch.tensor([5]), torch.tensor([0]))
    path = tmp_path / "theirs.safetensors"
    (tmp_path / "new").touch()
    writer.save(path)
    assert path.stat().st_mode == (tmp_path / "new").stat().st_mode
    path.chmod(0o640)
    writer.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_the_lines_for_a_dump_write_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of docs/traces.md, run as it stands."""
    page = (ROOT / "docs/traces.md").read_text(encoding="utf-8")
    section = page.partition("## Values from a dump")[2]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    hook = load_hook("trace_writer", monkeypatch)
    monkeypatch.setitem(sys.modules, "trace_writer", hook)
    monkeypatch.chdir(tmp_path)
    q = torch.randn(6, 4, 8)
    kv = torch.randn(6, 8).half()
    streams = torch.randn(6, 4, 16)
    given = {
        "torch": torch,
        "model_folder": config_folder(tmp_path / "tiny"),
        "head_dim": 8,
        "token_ids": torch.tensor([3, 5, 7, 1, 0, 9], dtype=torch.int32),
        "dump": {"blk.3.q": q.flatten(1), "blk.3.kv": kv.T, "blk.3.out": streams[None]},
    }
    exec(block[1], given)
    found = read_joined([tmp_path / "theirs.safetensors"], [3, 5, 7, 1, 0, 9])
    expected = {"layers.3.attn.q": q, "layers.3.attn.kv": kv, "layers.3.streams": streams}
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in expected.items()
    }
