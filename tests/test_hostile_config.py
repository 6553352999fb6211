"""Configurations that nobody would write: broken JSON, values of any type, files that are none."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.checkpoint import tiny_config
from dsv4.config import ModelConfig
from dsv4.errors import UserError, shorten
from dsv4.json_object import MAX_JSON_BYTES, parse_json_object, read_json_object
from tests.hf_config import hf_config

HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([0, 1, 2, 4, 128, "yarn", "default", "hash_moe", "moe", 10**400, -math.inf]),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(data=st.data(), base=st.sampled_from([tiny_config, hf_config]))
def test_hostile_values_give_a_config_or_one_clean_line(data: st.DataObject, base: Any) -> None:
    raw = base()
    for key in data.draw(st.lists(st.sampled_from(sorted(raw)), min_size=1, max_size=3)):
        raw[key] = data.draw(HOSTILE)
    message = ""
    try:
        config = ModelConfig.from_dict(raw)
    except UserError as error:
        message = str(error)
    else:
        assert all(type(ratio) is int for ratio in config.compress_ratios)
        assert math.isfinite(config.rms_norm_eps)
    assert message.isprintable()


@given(st.dictionaries(st.text(max_size=10), HOSTILE, max_size=5))
def test_arbitrary_objects_are_refused_cleanly(raw: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        ModelConfig.from_dict(raw)


@given(part=st.sampled_from(["main", "compress"]), key=st.text(max_size=8), value=HOSTILE)
def test_hostile_rope_parameters(part: str, key: str, value: Any) -> None:
    raw = hf_config()
    raw["rope_parameters"][part] = {**raw["rope_parameters"][part], key: value, "factor": value}
    message = ""
    try:
        ModelConfig.from_dict(raw)
    except UserError as error:
        message = str(error)
    assert message.isprintable()


BROKEN = [
    "",
    "[]",
    "1",
    "{",
    '{"a": 1, "a": 2}',
    '{"a": {"b": 1, "b": 1}}',
    '{"a": ' + "1" * 5000 + "}",
    "[" * 100_000,
    *('{"a": [NaN]}', '{"a": Infinity}', '{"a": {"b": -Infinity}}', '{"a": 1e999}'),
]


@pytest.mark.parametrize("text", BROKEN)
def test_text_that_is_no_proper_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json: (not valid JSON|found a JSON)"):
        read_json_object(tmp_path / "config.json")
    with pytest.raises(UserError, match="config.json"):
        ModelConfig.from_folder(tmp_path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_json_object(tmp_path / "config.json")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UserError, match="cannot be read .found something else than a regular"):
            read_json_object(path)
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"config.json: cannot be read .byte 0 is not UTF-8.$"):
        read_json_object(tmp_path / "config.json")
    beside = tmp_path / "config.json" / "index.json"
    with pytest.raises(UserError, match=r"index.json: cannot be read .Not a directory.$"):
        read_json_object(beside)


def test_a_file_beyond_the_largest_size_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as opened:
        opened.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(UserError, match=f"found {MAX_JSON_BYTES + 1} bytes, expected at most"):
        read_json_object(file)


def test_a_number_that_is_not_finite_is_named() -> None:
    with pytest.raises(
        UserError, match="^x: not valid JSON .found NaN, expected a finite number.$"
    ):
        parse_json_object('{"a": NaN}', "x")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\ufeff{}", "a byte order mark, expected none"),
        ('{"a": ' + "9" * 5000 + "}", "an integer of 5000 digits, expected at most 4300"),
        ('{"a": [-' + "9" * 5000 + "]}", "an integer of 5000 digits, expected at most 4300"),
    ],
)
def test_a_byte_order_mark_and_an_integer_too_long_are_named(text: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_json_object(text, "x")
    assert str(caught.value) == f"x: not valid JSON (found {found})"


def test_json_text_is_parsed() -> None:
    assert parse_json_object(json.dumps({"a": [1, {"b": None}]}), "x") == {"a": [1, {"b": None}]}


def test_values_in_messages_are_short_and_one_line() -> None:
    assert shorten("a\nb") == "'a\\nb'"
    assert len(shorten("x" * 1000)) == 80
