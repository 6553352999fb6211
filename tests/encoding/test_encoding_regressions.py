"""Publicly reported faults of chat encodings and tool parsers: rows G47 and I of
docs/regressions.md.
"""

import json
from pathlib import Path

import pytest

from encoding import (
    ContentDelta,
    ReasoningDelta,
    StreamingParser,
    Tokenizer,
    ToolCallArguments,
    ToolCallStart,
    detect_profile,
    encode_messages,
    parse_completion,
    parse_message_from_completion_text,
)

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
HI = {"role": "user", "content": "hi"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
]
BLOCK = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def arguments_of(text: str) -> list[dict]:
    calls = parse_completion(text, "chat").message["tool_calls"]
    return [json.loads(call["function"]["arguments"]) for call in calls]


def test_spec11_g47_max_effort_is_reachable_with_the_official_profile(tmp_path: Path) -> None:
    (tmp_path / "encoding").mkdir()
    source = 'DEFAULT_REASONING_EFFORT = "low"\nPREFIXES = {"low": "", "high": HIGH, "max": MAX}\n'
    (tmp_path / "encoding" / "encoding_dsv4.py").write_text(source, encoding="utf-8")
    profile = detect_profile(tmp_path)
    prompts = {
        effort: encode_messages([HI], "thinking", reasoning_effort=effort, profile=profile)
        for effort in ("low", "high", "max")
    }
    assert prompts["low"].startswith(f"{BOS}{USER}")
    assert prompts["high"].startswith(f"{BOS}Reasoning Effort: Absolute maximum")
    assert prompts["max"].startswith(f"{BOS}Reasoning Effort: Beyond maximum")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 1000])
@pytest.mark.parametrize("marker", ["｜DSML｜", "|DSML|"])
def test_spec11_i52_no_dsml_leaks_into_streamed_text(size: int, marker: str) -> None:
    text = f"think</think>answer{BLOCK}{EOS}".replace("｜DSML｜", marker)
    parser = StreamingParser("thinking")
    events = [
        event
        for start in range(0, len(text), size)
        for event in parser.feed(text[start : start + size])
    ]
    events += parser.finish()
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "think"
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == "answer"
    assert len(parser.completion.message["tool_calls"]) == 1


@pytest.mark.parametrize("wrapper", ["arguments", "input"])
def test_spec11_i53_wrapped_arguments_are_unwrapped(wrapper: str) -> None:
    text = BLOCK.replace(
        'name="city" string="true">Paris', f'name="{wrapper}" string="false">{{"city": "Paris"}}'
    )
    assert arguments_of(text + EOS) == [{"city": "Paris"}]


def test_spec11_i53_parameter_without_string_attribute_is_not_lost() -> None:
    assert arguments_of(BLOCK.replace(' string="true"', "") + EOS) == [{"city": "Paris"}]
    assert arguments_of(BLOCK.replace(' string="true">Paris', ">3") + EOS) == [{"city": 3}]


def test_spec11_i53_empty_arguments_are_an_empty_object() -> None:
    start = BLOCK.index("<｜DSML｜parameter")
    end = BLOCK.index("</｜DSML｜invoke>")
    for inside in ("", "\n", "\n\n"):
        assert arguments_of(BLOCK[:start] + inside + BLOCK[end:] + EOS) == [{}]


def test_spec11_i53_ascii_bars_are_read() -> None:
    assert arguments_of(BLOCK.replace("｜", "|") + EOS) == [{"city": "Paris"}]


def test_spec11_i53_tool_calls_stream_before_the_text_ends() -> None:
    parser = StreamingParser("chat")
    assert parser.feed(BLOCK[: BLOCK.index("</｜DSML｜invoke>")]) == [
        ToolCallStart(0, "f"),
        ToolCallArguments(0, '{"city": "Paris"'),
    ]


def test_spec11_i54_dict_arguments_are_not_double_nested() -> None:
    def prompt(arguments: object) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return encode_messages(
            [HI, {"role": "assistant", "content": "", "tool_calls": [call]}], "chat"
        )

    arguments = {"city": "Paris", "n": [1, {"é": None}]}
    assert prompt(arguments) == prompt(json.dumps(arguments))
    assert '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>' in prompt(
        arguments
    )
    assert 'name="arguments"' not in prompt(arguments)


def test_spec11_i55_a_closed_assistant_turn_gets_no_generation_prompt() -> None:
    prompt = encode_messages([HI, {"role": "assistant", "content": "a"}], "chat")
    assert prompt == f"{BOS}{USER}hi{ASSISTANT}</think>a{EOS}"


def test_spec11_i55_a_final_message_can_be_continued() -> None:
    chat = encode_messages(
        [HI, {"role": "assistant", "content": "The capital is", "wo_eos": True}], "chat"
    )
    assert chat == f"{BOS}{USER}hi{ASSISTANT}</think>The capital is"
    answer = {"role": "assistant", "content": "The", "reasoning_content": "r", "wo_eos": True}
    assert (
        encode_messages([HI, answer], "thinking") == f"{BOS}{USER}hi{ASSISTANT}<think>r</think>The"
    )


def test_spec11_i56_reasoning_does_not_land_in_the_content() -> None:
    assert encode_messages([HI], "thinking").endswith("<think>")
    for text in (f"r</think>c{EOS}", f"<think>r</think>c{EOS}"):
        message = parse_completion(text, "thinking").message
        assert (message["reasoning_content"], message["content"]) == ("r", "c")
    truncated = parse_completion("only reasoning so far", "thinking").message
    assert (truncated["reasoning_content"], truncated["content"]) == ("only reasoning so far", "")


def test_spec11_i57_reasoning_is_replayed_with_tool_turns() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "s", "tools": TOOLS},
        HI,
        {"role": "assistant", "content": "", "reasoning_content": "r1", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "R"},
        {"role": "assistant", "content": "a", "reasoning_content": "r2"},
        HI,
    ]
    prompt = encode_messages(messages, "thinking")
    assert f"{ASSISTANT}<think>r1</think>\n\n<｜DSML｜tool_calls>" in prompt
    assert (
        f"<tool_result>R</tool_result>{ASSISTANT}<think>r2</think>a{EOS}{USER}hi{ASSISTANT}<think>"
        in prompt
    )


def test_spec11_i57_a_parsed_tool_turn_goes_back_byte_for_byte() -> None:
    completion = f"because</think>text{BLOCK}{EOS}"
    message = parse_message_from_completion_text(completion, "thinking")
    messages = [{"role": "system", "content": "s", "tools": TOOLS}, HI]
    prompt = encode_messages(messages, "thinking")
    assert encode_messages([*messages, message], "thinking") == prompt + completion


@pytest.mark.slow
def test_spec11_i58_bos_is_not_doubled_by_the_tokenizer(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    settings = json.loads(tokenizer_file.read_text("utf-8"))
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": BOS, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
    }
    adds_bos = tmp_path / "tokenizer.json"
    adds_bos.write_text(json.dumps(settings), encoding="utf-8")
    prompt = encode_messages([HI], "chat")
    assert prompt.count(BOS) == 1
    for file in (tokenizer_file, adds_bos):
        assert Tokenizer(file).encode(prompt) == [0, 128803, 6366, 128804, 128822]


@pytest.mark.parametrize("reasoning", ["r", "<think>r", "<think>r</think>", "r</think>"])
def test_spec11_i59_echoed_reasoning_does_not_double_the_think_tags(reasoning: str) -> None:
    messages = [{"role": "system", "content": "s", "tools": TOOLS}, HI]
    answer = {"role": "assistant", "content": "a", "reasoning_content": reasoning}
    prompt = encode_messages([*messages, answer, HI], "thinking")
    assert f"{ASSISTANT}<think>r</think>a{EOS}" in prompt
