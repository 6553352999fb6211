"""Publicly reported faults of streams and turns: rows J of docs/regressions.md."""

import json
import random
import re
import string
from collections.abc import Iterable
from itertools import pairwise

import pytest

from encoding import (
    Completion,
    IncrementalDecoder,
    StreamingParser,
    Tokenizer,
    encode_messages,
    parse_completion,
)
from tests.encoding.messages import HI
from tests.encoding.test_encoding_regressions import ASSISTANT, BLOCK, BOS, EOS, USER


def streamed(parts: Iterable[str], mode: str) -> Completion:
    parser = StreamingParser(mode)
    for part in parts:
        parser.feed(part)
    parser.finish()
    return parser.completion


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """What a stream shows of each token of ``text``."""
    decoder = IncrementalDecoder(tokenizer)
    return [*map(decoder.push, tokenizer.encode(text)), decoder.flush()]


def identifiers_and_command_lines(count: int) -> list[str]:
    """Half of them each, of characters that tokens join in many ways."""
    rng = random.Random(65)
    letters = string.ascii_letters + string.digits + "_"
    flags = ["-", "--", "/", "./", "~/", "$", "'", '"', "`", "\\", "<", ">", "|", "&&", "2>&1", "é"]

    def word() -> str:
        return "".join(rng.choices(letters, k=rng.randint(1, 24)))

    lines = [
        " ".join(
            rng.choice(flags) + word() + rng.choice(["", "=", "  ", "\t", ":", '"'])
            for _ in range(5)
        )
        for _ in range(count // 2)
    ]
    return [*(word() for _ in range(count - len(lines))), *lines]


def test_spec11_j65_identifiers_and_command_lines_are_echoed_byte_for_byte(
    tokenizer: Tokenizer,
) -> None:
    """In a prompt, in a streamed answer, and as the argument of a tool call that goes back."""
    for text in identifiers_and_command_lines(200):
        prompt = encode_messages([{"role": "user", "content": text}], "chat")
        assert prompt == f"{BOS}{USER}{text}{ASSISTANT}</think>"
        assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
        answer = streamed(pieces(tokenizer, text + EOS), "chat")
        assert (answer.message["content"], answer.repairs) == (text, ())
        function = {"name": "f", "arguments": json.dumps({"command": text})}
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        turn = encode_messages([call], "chat", context=[HI])
        found = streamed(pieces(tokenizer, turn), "chat").message["tool_calls"]
        assert [json.loads(one["function"]["arguments"]) for one in found] == [{"command": text}]


@pytest.mark.parametrize("size", range(1, 9))
def test_spec11_j84_j85_markers_inside_a_step_of_several_tokens(
    tokenizer: Tokenizer, size: int
) -> None:
    """The end of the reasoning and a tool block at every place of a step of up to 8 tokens."""
    text = f"think</think>answer{BLOCK}{EOS}"
    expected = parse_completion(text, "thinking")
    assert len(expected.message["tool_calls"]) == 1
    tokens = pieces(tokenizer, text)
    for first in range(1, size + 1):
        starts = [0, *range(first, len(tokens), size), len(tokens)]
        steps = ["".join(tokens[a:b]) for a, b in pairwise(starts)]
        assert streamed(steps, "thinking") == expected


def test_spec11_j86_a_tool_call_without_its_opening_tag_is_text_and_a_reason() -> None:
    block = BLOCK[BLOCK.index("<｜DSML｜invoke") :]
    completion = parse_completion(f"answer{block}{EOS}", "chat")
    assert completion.repairs[0] == "newlines_before_tool_block"
    assert "missing_tool_block_open" in completion.repairs
    assert len(completion.message["tool_calls"]) == 1
    for start in ("<｜DSML｜parameter", "Paris", "</｜DSML｜invoke>", "</｜DSML｜tool_calls>"):
        rest = BLOCK[BLOCK.index(start) :]
        completion = parse_completion(f"answer{rest}{EOS}", "chat")
        assert (completion.repairs, completion.complete) == (("stray_dsml_tag",), True)
        assert completion.message["tool_calls"] == []
        assert completion.message["content"] == "answer" + re.sub(r"</?｜DSML｜.*?>", "", rest)


@pytest.mark.parametrize("mode", ["chat", "thinking"])
@pytest.mark.parametrize("text", ["", "<think>", "</think>", "<think></think>", "\n\n"])
def test_spec11_j87_an_empty_turn_is_an_empty_message(mode: str, text: str) -> None:
    """Cut off or ended by the model; the reason says how."""
    for end in ("", EOS):
        completion = parse_completion(text + end, mode)
        message = completion.message
        assert (message["content"] + message["reasoning_content"]).strip() == ""
        assert message["tool_calls"] == []
        assert completion.complete is (end == EOS)
        assert ("missing_eos" in completion.repairs) is (end == "")
