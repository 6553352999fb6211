"""Completions as models really write them (model.md#parsing)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoding import (
    Completion,
    encode_messages,
    parse_message_from_completion_text,
)
from tests.encoding.completions import CALL, CLOSE, EOS, OPEN, calls, parse, texts
from tests.encoding.test_strict_parser import CALLS, GOOD, TEXT, messages_with


def test_a_completion_in_the_prescribed_format_needs_no_repair() -> None:
    completion = parse(GOOD)
    assert completion == Completion(parse_message_from_completion_text(GOOD, "thinking"), (), True)


@given(content=TEXT, reasoning=TEXT, arguments=CALLS)
def test_it_agrees_with_the_strict_parser_wherever_that_accepts(
    content: str, reasoning: str, arguments: list
) -> None:
    messages = messages_with(content, reasoning, arguments)
    text = encode_messages(messages[1:], "thinking", context=messages[:1])
    tools = [
        {"function": {"name": name, "parameters": {"properties": {"arguments": {}, "input": {}}}}}
        for name, _ in arguments
    ]
    assert parse(text, "thinking", tools) == Completion(
        parse_message_from_completion_text(text, "thinking"), (), True
    )


@pytest.mark.parametrize("name", ['name="a"', 'name="f"'])
def test_long_names_are_read(name: str) -> None:
    text = GOOD.replace(name, f'name="{"n" * 4000}"')
    strict = parse_message_from_completion_text(text, "thinking")
    assert parse(text) == Completion(strict, (), True)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("r</think>half an ans", "r", "half an ans"),
        ("half a thou", "half a thou", ""),
        ("r</think>if a <", "r", "if a <"),
        ("r</think>a line\n\n", "r", "a line\n\n"),
        ("", "", ""),
    ],
)
def test_truncated_text_is_kept_and_incomplete(text: str, reasoning: str, content: str) -> None:
    completion = parse(text)
    assert texts(completion) == (reasoning, content)
    assert "missing_eos" in completion.repairs
    assert not completion.complete


def test_every_truncation_of_a_completion_is_incomplete_and_shows_no_marker() -> None:
    for length in range(len(GOOD) - len(EOS)):
        completion = parse(GOOD[:length])
        assert not completion.complete
        assert "DSML" not in "".join(texts(completion))
        assert calls(completion) in ([], [("f", {"a": "x", "b": [1]})])


@pytest.mark.parametrize(
    "end", [CALL.index(">x<") + 2, CALL.index("</｜DSML｜inv") + 5, CALL.index("</｜DSML｜inv")]
)
def test_a_call_cut_off_in_the_middle_is_left_out(end: int) -> None:
    completion = parse(f"r</think>\n\n{OPEN}{CALL}{CALL[:end]}")
    assert calls(completion) == [("f", {"a": "x"})]
    assert "unfinished_tool_call" in completion.repairs
    assert not completion.complete


def test_a_call_that_the_model_itself_left_open_counts() -> None:
    completion = parse(f"r</think>\n\n{OPEN}{CALL[: CALL.index('</｜DSML｜inv')]}{EOS}")
    assert calls(completion) == [("f", {"a": "x"})]
    assert completion.repairs == ("unclosed_tool_call", "unclosed_tool_block")
    assert completion.complete


@pytest.mark.parametrize(
    ("left_open", "repairs"),
    [
        ("</｜DSML｜invoke>", ("unclosed_tool_call",)),
        ("</｜DSML｜parameter>", ("unclosed_parameter", "unclosed_tool_call")),
    ],
)
def test_a_call_that_the_next_one_ends_counts_and_so_does_the_next_one(
    left_open: str, repairs: tuple[str, ...]
) -> None:
    begun = CALL[: CALL.index(left_open)]
    completion = parse(f"\n\n{OPEN}{begun}{CALL}{CLOSE}{EOS}", "chat")
    assert calls(completion) == [("f", {"a": "x"})] * 2
    assert completion.repairs == repairs


@pytest.mark.parametrize("begun", ['<｜DSML｜invoke name="', "<｜DSML｜parameter name='"])
def test_an_attribute_that_is_left_open_reaches_no_further_than_the_end(begun: str) -> None:
    """The model's end is not in it, and what it says behind such a tag is not lost."""
    completion = parse(f"{begun}a, as I said.{EOS}", "chat")
    assert texts(completion) == ("", f"{begun.removeprefix('<｜DSML｜')}a, as I said.")
    assert completion.repairs == ("stray_control_token",)
    assert completion.complete
    called = parse(f"{OPEN}{CALL[: CALL.index('</｜DSML｜inv')]}{begun}b{EOS}", "chat")
    assert called.complete
    assert calls(called) == [("f", {"a": "x"})]


def test_without_think_close_everything_is_reasoning() -> None:
    completion = parse(f"all of it{EOS}")
    assert texts(completion) == ("all of it", "")
    assert completion.repairs == ("missing_think_close",)
    assert completion.complete


def test_tool_block_inside_the_reasoning() -> None:
    completion = parse(f"r\n\n{OPEN}{CALL}{CLOSE}</think>c{EOS}")
    assert texts(completion) == ("r", "c")
    assert calls(completion) == [("f", {"a": "x"})]
    assert completion.repairs == ("tool_block_in_reasoning",)
    unclosed = parse(f"r\n\n{OPEN}{CALL}{CLOSE}{EOS}")
    assert texts(unclosed) == ("r", "")
    assert calls(unclosed) == [("f", {"a": "x"})]
    assert unclosed.repairs == ("tool_block_in_reasoning", "missing_think_close")


def test_white_space_behind_a_tool_block_stays_in_the_reasoning_that_goes_on() -> None:
    completion = parse(f"r\n\n{OPEN}{CALL}{CLOSE}\n\nmore</think>c{EOS}")
    assert texts(completion) == ("r\n\nmore", "c")
    assert calls(completion) == [("f", {"a": "x"})]


@pytest.mark.parametrize(
    ("breaks", "content"), [("", "c"), ("\n", "c"), ("\n\n", "c"), ("\n\n\n", "c\n")]
)
def test_line_breaks_before_the_block_are_not_content(breaks: str, content: str) -> None:
    completion = parse(f"c{breaks}{OPEN}{CALL}{CLOSE}{EOS}", "chat")
    assert texts(completion) == ("", content)
    assert calls(completion) == [("f", {"a": "x"})]
    assert completion.repairs == (() if len(breaks) > 1 else ("newlines_before_tool_block",))


def test_ascii_bars() -> None:
    completion = parse(f"\n\n{OPEN}{CALL}{CLOSE}{EOS}".replace("｜DSML｜", "|DSML|"), "chat")
    assert texts(completion) == ("", "")
    assert calls(completion) == [("f", {"a": "x"})]
    assert completion.repairs == ("ascii_bars",)


def test_missing_markers() -> None:
    completion = parse(f"c\n\n{OPEN}{CALL}{CLOSE}{EOS}".replace("｜DSML｜", ""), "chat")
    assert texts(completion) == ("", "c")
    assert calls(completion) == [("f", {"a": "x"})]
    assert completion.repairs == ("missing_dsml_marker",)


@pytest.mark.parametrize(
    "text",
    [
        "use <tool_calls> here",
        'an <invoke name="f"> tag',
        "<tool_calls>\n<tool>",
        "a < b </think",
        "</parameter>",
    ],
)
def test_text_about_tags_without_markers_stays_text(text: str) -> None:
    assert texts(parse(f"{text}{EOS}", "chat")) == ("", text)


def test_a_call_without_a_block_around_it() -> None:
    completion = parse(f"c\n\n{CALL}{EOS}", "chat")
    assert texts(completion) == ("", "c")
    assert calls(completion) == [("f", {"a": "x"})]
    assert completion.repairs == ("missing_tool_block_open", "unclosed_tool_block")


@pytest.mark.parametrize(
    "closing",
    ["</|DSML|parameter>", "<｜DSML｜/parameter>", "</｜DSML｜parameter >", "</parameter>", ""],
)
@pytest.mark.parametrize(
    "after", [CALL.split("\n")[1] + "\n</｜DSML｜invoke>\n", "</｜DSML｜invoke>\n", ""]
)
def test_variants_of_the_closing_tag(closing: str, after: str) -> None:
    start = '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="p" string="true"><b>v</b>'
    completion = parse(f"\n\n{OPEN}{start}{closing}\n{after}{CLOSE}{EOS}", "chat")
    expected = {"p": "<b>v</b>", "a": "x"} if "parameter" in after else {"p": "<b>v</b>"}
    assert calls(completion) == [("f", expected)]
    assert texts(completion) == ("", "")
    assert completion.repairs


def test_closing_tags_without_marker_after_an_opening_with_it() -> None:
    start = '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="p" string="true">v'
    completion = parse(f"\n\n{OPEN}{start}</parameter>\n</invoke>\n</tool_calls>{EOS}", "chat")
    assert calls(completion) == [("f", {"p": "v"})]
    assert texts(completion) == ("", "")


def test_several_blocks_are_joined() -> None:
    completion = parse(f"\n\n{OPEN}{CALL}{CLOSE}\n\n{OPEN}{CALL}{CLOSE}{EOS}", "chat")
    assert calls(completion) == [("f", {"a": "x"})] * 2
    assert texts(completion) == ("", "")
    assert completion.repairs == ("multiple_tool_blocks",)


@pytest.mark.parametrize("space", ["\n", "  ", "\n\n"])
def test_white_space_after_the_block_is_left_out(space: str) -> None:
    completion = parse(f"c\n\n{OPEN}{CALL}{CLOSE}{space}{EOS}", "chat")
    assert texts(completion) == ("", "c")
    assert completion.repairs == ("whitespace_after_tool_block",)


@pytest.mark.parametrize(("before", "content"), [("c", "c\nmore"), ("", "more")])
def test_text_after_the_block_is_content(before: str, content: str) -> None:
    completion = parse(f"{before}\n\n{OPEN}{CALL}{CLOSE}\nmore{EOS}", "chat")
    assert texts(completion) == ("", content)
    assert completion.repairs == ("text_after_tool_block",)


def test_stray_think_tags() -> None:
    assert texts(parse(f"a</think>b{EOS}", "chat")) == ("", "ab")
    assert parse(f"a</think>b{EOS}", "chat").repairs == ("stray_think_close",)
    assert texts(parse(f"</think>b{EOS}", "chat")) == ("", "b")
    assert texts(parse(f"r</think>a</think>b{EOS}")) == ("r", "ab")
    assert parse(f"<think>r</think>a{EOS}").repairs == ("stray_think_open",)
    again = parse(f"</think><think>a{EOS}")
    assert (texts(again), again.repairs) == (("", "a"), ("stray_think_open",))
    assert texts(parse(f"<think>r</think>a{EOS}")) == ("r", "a")
    begun = parse(f"a<｜begin▁of▁sentence｜>b{EOS}", "chat")
    assert (texts(begun), begun.repairs) == (("", "ab"), ("stray_control_token",))
    first = parse(f"<｜begin▁of▁sentence｜>a{EOS}", "chat")
    assert (texts(first), first.repairs) == (("", "a"), ("stray_control_token",))


def test_reasoning_in_chat_mode_is_told_apart() -> None:
    completion = parse(f"<think>r</think>a{EOS}", "chat")
    assert texts(completion) == ("r", "a")
    assert completion.repairs == ("reasoning_in_chat_mode",)
    assert texts(parse(f"a<think>b{EOS}", "chat")) == ("", "ab")
    assert parse(f"a<think>b{EOS}", "chat").repairs == ("stray_think_open",)
    assert texts(parse(f"\n <think>r</think>a{EOS}", "chat")) == ("r", "\n a")


@pytest.mark.parametrize(
    ("before", "reasoning", "content"),
    [("<think>r</think>", "r", "ab"), (f"\n\n{OPEN}{CALL}{CLOSE}", "", "ab")],
)
def test_in_chat_mode_reasoning_only_begins_the_turn(
    before: str, reasoning: str, content: str
) -> None:
    completion = parse(f"{before}<think>a</think>b{EOS}", "chat")
    assert texts(completion) == (reasoning, content)
    assert "stray_think_open" in completion.repairs


def test_text_after_the_end_is_ignored() -> None:
    completion = parse(f"a{EOS}b{EOS}", "chat")
    assert texts(completion) == ("", "a")
    assert completion.repairs == ("text_after_eos",)


def test_unknown_mode_and_malformed_tools_are_refused() -> None:
    with pytest.raises(ValueError, match="thinking_mode is 'deep'"):
        parse("x", "deep")
    with pytest.raises(ValueError, match=r'tools\[0\] has no object "function"'):
        parse("x", "chat", [{}])


@given(
    text=st.text(max_size=60)
    | st.lists(st.sampled_from([*GOOD, OPEN, CALL, CLOSE, EOS])).map("".join)
)
def test_any_text_gives_a_message_with_valid_arguments(text: str) -> None:
    for mode in ("chat", "thinking"):
        completion = parse(text, mode)
        assert set(completion.message) == {"role", "content", "reasoning_content", "tool_calls"}
        assert completion.complete <= (EOS in text)
        assert all(isinstance(arguments, dict) for _, arguments in calls(completion))
