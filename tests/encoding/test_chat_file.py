"""OpenAI-style chat files (model.md#messages)."""

import json
from pathlib import Path
from typing import Any

import pytest

from encoding import encode_messages, load_messages, messages_of_json, messages_of_request

HI = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_a_list_and_an_object_with_messages_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    for value in ([HI], {"messages": [HI], "temperature": 0.5}):
        file.write_text(json.dumps(value), encoding="utf-8")
        assert load_messages(file) == [HI]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_request_level_tools_go_to_the_leading_instructions(role: str) -> None:
    first = {"role": role, "content": "S"}
    assert messages_of_request({"messages": [first, HI], "tools": TOOLS}) == [
        {**first, "tools": TOOLS},
        HI,
    ]
    assert first == {"role": role, "content": "S"}


def test_without_leading_instructions_an_empty_system_message_is_inserted() -> None:
    messages = messages_of_request({"messages": [HI], "tools": TOOLS})
    assert messages == [{"role": "system", "content": "", "tools": TOOLS}, HI]
    assert encode_messages(messages, "chat").startswith("<｜begin▁of▁sentence｜>\n\n## Tools")


@pytest.mark.parametrize("messages", [[], ["hi"]])
def test_what_is_no_instruction_gets_the_tools_in_front_of_it(messages: list) -> None:
    system = {"role": "system", "content": "", "tools": TOOLS}
    assert messages_of_request({"messages": messages, "tools": TOOLS}) == [system, *messages]


def test_tools_are_named_as_the_request_has_them() -> None:
    with pytest.raises(ValueError, match=r'^tools\[0\] has no object "function"'):
        messages_of_request({"messages": [HI], "tools": [{"name": "f"}]})


def test_response_formats_of_a_request() -> None:
    def rendered(response_format: Any) -> str:
        request = {"messages": [HI], "response_format": response_format}
        return encode_messages(messages_of_request(request), "chat", add_default_bos_token=False)

    assert rendered({"type": "text"}) == encode_messages([HI], "chat", add_default_bos_token=False)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    assert rendered(schema).split("<｜User｜>")[0].endswith('to reply:\n{"type": "object"}')
    assert (
        rendered({"type": "object"})
        .split("<｜User｜>")[0]
        .endswith('to reply:\n{"type": "object"}')
    )
    anything = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
    assert rendered(anything) == rendered({"type": "text"})
    for wrapper in (None, {"name": "n"}, {"schema": "x"}):
        with pytest.raises(ValueError, match="json_schema lacks"):
            rendered({"type": "json_schema", "json_schema": wrapper})
    for wrong in ("text", 5, []):
        with pytest.raises(ValueError, match=r"response_format is .*, expected an object"):
            rendered(wrong)


def test_a_repeated_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text('[{"role": "user", "content": "a", "content": "b"}]')
    with pytest.raises(ValueError, match=r"chat.json: .*the key 'content' occurs twice"):
        load_messages(file)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, number: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(f'{{"messages": [], "tools": [{{"x": {number}}}]}}')
    expected = rf"chat.json: not valid JSON \(found {number}, expected a finite number\)"
    with pytest.raises(ValueError, match=expected):
        load_messages(file)


def test_a_byte_order_mark_and_an_integer_too_long_are_named(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text('[{"role": "user", "content": -' + "9" * 5000 + "}]")
    found = r"found an integer of 5000 digits, expected at most 4300"
    with pytest.raises(ValueError, match=rf"chat.json: not valid JSON \({found}\)$"):
        load_messages(file)
    with pytest.raises(ValueError, match=r"^not valid JSON .found a byte order mark, expected no"):
        messages_of_json("\ufeff[]")


def test_tools_given_twice_are_refused() -> None:
    request = {"messages": [{"role": "system", "content": "", "tools": TOOLS}], "tools": TOOLS}
    with pytest.raises(
        ValueError, match="tools is given both in the request and in its first message"
    ):
        messages_of_request(request)


@pytest.mark.parametrize("text", ["", "{", "5", '{"messages": {}}', "[" * 100_000, "\udcff"])
def test_a_wrong_file_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "chat.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="chat.json: ") as error:
        load_messages(file)
    assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="nowhere.json: no such messages file"):
        load_messages(tmp_path / "nowhere.json")
