"""Prompts, small files and flags that the driver refuses before it reads much of them."""

import os
from pathlib import Path

import pytest

from dsv4.encoding import Tokenizer
from tests.driver.drive import Drive


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--raw", "--allow-control-tokens"], ["--raw", "--allow-control-tokens"]),
        (["--parallel", "expert"], ["--parallel", "'expert'"]),
    ],
)
def test_flags_that_mean_nothing_are_one_line(
    drive: Drive, flags: list[str], parts: list[str]
) -> None:
    drive(*flags).assert_user_error(*parts)


@pytest.mark.slow
def test_a_huge_prompt_is_refused_before_it_is_encoded(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unasked(*_: object) -> None:
        raise AssertionError("the prompt was encoded")

    monkeypatch.setattr(Tokenizer, "encode", unasked)
    monkeypatch.setattr(Tokenizer, "_required_id", lambda *_: 0)
    monkeypatch.setattr(Tokenizer, "_check_round_trip", lambda *_: None)
    path = tmp_path / "huge.txt"
    path.write_text("a " * 5_000_000)
    for flags in ([], ["--raw"], ["--max-context", "1000"]):
        drive("--prompt-file", path, *flags).assert_user_error(
            "--max-context: found a prompt of at least", "tokens, expected at most"
        )


SMALL_FILES = ["config.json", "hf_quant_config.json", "generation_config.json", "tokenizer.json"]
NO_FILES = {
    "fifo": "regular file",
    "device": "outside the folder",
    "outside": "outside the folder",
    "dangling": "does not exist",
    "loop": "loop",
}


@pytest.mark.parametrize("file", SMALL_FILES)
@pytest.mark.parametrize("kind", NO_FILES)
def test_small_files_are_regular_files_of_the_folder(
    drive: Drive, broken_copy: Path, file: str, kind: str
) -> None:
    path = broken_copy / file
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "outside":
        outside = broken_copy.parent / "outside.json"
        outside.write_text("{}")
        path.symlink_to(outside)
    else:
        path.symlink_to({"device": "/dev/zero", "dangling": "gone.json", "loop": file}[kind])
    drive("--model", broken_copy).assert_user_error(file, NO_FILES[kind])


def test_links_inside_the_folder_are_followed(drive: Drive, broken_copy: Path) -> None:
    for file in ("config.json", "tokenizer.json"):
        (broken_copy / file).rename(broken_copy / f"real_{file}")
        (broken_copy / file).symlink_to(f"real_{file}")
    assert drive("--model", broken_copy, "--plan").code == 0
