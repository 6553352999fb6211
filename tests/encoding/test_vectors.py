"""Recorded prompts, token ids and parsed completions of the official encoder
(model.md#chat-encoding).
"""

import json
from pathlib import Path

import pytest

from encoding import Tokenizer, encode_messages, parse_message_from_completion_text

VECTORS = json.loads(
    (Path(__file__).resolve().parent.parent / "data/encoding_vectors.json").read_text("utf-8")
)
ENCODE = {case["name"]: case for case in VECTORS["encode"]}
PARSE = {case["name"]: case for case in VECTORS["parse"]}


@pytest.mark.parametrize("name", ENCODE)
def test_prompt_equals_the_recorded_one_byte_for_byte(name: str) -> None:
    case = ENCODE[name]
    assert (
        encode_messages(case["messages"], case["thinking_mode"], **case["options"])
        == case["prompt"]
    )


@pytest.mark.parametrize("name", ENCODE)
def test_neutralising_changes_nothing_in_ordinary_conversations(name: str) -> None:
    case = ENCODE[name]
    options = {**case["options"], "neutralize_control_tokens": False}
    assert encode_messages(case["messages"], case["thinking_mode"], **options) == case["prompt"]


@pytest.mark.parametrize("name", ENCODE)
def test_prompt_tokenises_to_the_recorded_ids_and_back(name: str, tokenizer: Tokenizer) -> None:
    case = ENCODE[name]
    assert tokenizer.encode(case["prompt"]) == case["token_ids"]
    assert tokenizer.decode(case["token_ids"]) == case["prompt"]


@pytest.mark.parametrize("name", PARSE)
def test_strict_parser_gives_the_recorded_message_or_refuses(name: str) -> None:
    case = PARSE[name]
    if "error" in case:
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            parse_message_from_completion_text(case["text"], case["mode"])
    else:
        assert parse_message_from_completion_text(case["text"], case["mode"]) == case["result"]


def test_tools_block_equals_the_recorded_one() -> None:
    tools = [{"type": "function", "function": {"name": "lookup"}}]
    prompt = encode_messages(
        [{"role": "system", "content": "", "tools": tools}], "chat", add_default_bos_token=False
    )
    assert prompt == "\n\n" + VECTORS["tools_block"]
