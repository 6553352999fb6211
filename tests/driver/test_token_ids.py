"""``--token-ids``: every way to write a list of ids, and what is refused."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4.cli.token_id_file import read_token_ids
from dsv4.errors import UserError
from encoding import Tokenizer
from tests.driver.conftest import read_json
from tests.driver.drive import Drive


@pytest.mark.parametrize(
    "text",
    ["[0, 17, 3]", "[0,17,\n3]\n", "0 17 3", "0\n17\n3\n", "0,17,3", " 0, 17,\t3,\n", "00 017 3"],
)
def test_every_way_to_write_ids(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ids"
    path.write_text(text)
    assert read_token_ids(str(path), 100) == [0, 17, 3]


@pytest.mark.parametrize("text", ["[0, 17]", "0 17"])
def test_a_byte_order_mark_is_no_part_of_the_ids(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ids"
    path.write_text(text, encoding="utf-8-sig")
    assert read_token_ids(str(path), 100) == [0, 17]


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"[5, 6]")))
    assert read_token_ids("-", 100) == [5, 6]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found no token ids, expected at least 1"),
        (b"[]", "found no token ids, expected at least 1"),
        (b"1 2 100", "found 100 at index 2, expected token ids from 0 to 99"),
        (b"[1, -1]", "found -1 at index 1, expected token ids from 0 to 99"),
        (b"1 -1", "found '-1' at index 1, expected token ids from 0 to 99"),
        (b"[1, true]", "found True at index 1"),
        (b"[1, 2.0]", "found 2.0 at index 1"),
        (b"[[1]]", "found [1] at index 0"),
        (b"one two", "found 'one' at index 0"),
        (b"1,,2", "found '' at index 1"),
        ("\u0663".encode(), "found '\u0663' at index 0"),
        (b"[1, 2", "not a list of token ids ("),
        (b"[1] 2", "not a list of token ids ("),
        (b"[" * 100_000, "not a list of token ids ("),
        (b"\xff\xfe", "not a list of token ids ("),
        (b"1 " + b"9" * 5000, "not a list of token ids (found an integer of 5000 digits, exp"),
        (b"[%s]" % (b"9" * 5000), "not a list of token ids (found an integer of 5000 digits, exp"),
    ],
)
def test_what_is_no_list_of_ids_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "ids"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_token_ids(str(path), 100)
    assert str(caught.value).startswith(f"--token-ids: {path}: {message}")
    assert "\n" not in str(caught.value)


def test_ids_are_the_prompt_as_they_are(drive: Drive, checkpoint: Path, tmp_path: Path) -> None:
    """No beginning-of-sequence token in front, no chat encoding, and plain text comes out."""
    ids = tmp_path / "ids.json"
    path = tmp_path / "report.json"
    token_ids = Tokenizer(checkpoint).encode("Hi there")
    ids.write_text(json.dumps(token_ids))
    drive("--token-ids", ids, "--max-tokens", 2, "--ignore-eos", "--json", path)
    report = read_json(path)
    assert report["prompt"] == {"text": "Hi there", "token_ids": token_ids}
    assert report["completion"]["message"]["content"] == report["completion"]["text"]


@pytest.mark.parametrize("flags", [["--system", "x"], ["--thinking", "on"], ["--prompt", "x"]])
def test_ids_exclude_what_needs_an_encoding(drive: Drive, flags: list[str]) -> None:
    drive("--token-ids", "ids", *flags).assert_user_error("--token-ids", flags[0])


def test_a_file_that_is_not_there(drive: Drive) -> None:
    drive("--token-ids", "/no/such/ids").assert_user_error("--token-ids: /no/such/ids: cannot be")
