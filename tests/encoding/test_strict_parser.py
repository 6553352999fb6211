"""The strict parser refuses every deviation from the prescribed completion (model.md#parsing)."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoding import encode_messages, parse_message_from_completion_text

EOS = "<｜end▁of▁sentence｜>"
GOOD = (
    "r</think>c\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="false">[1]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    f"</｜DSML｜tool_calls>{EOS}"
)


def test_the_text_that_the_cases_below_break_is_accepted() -> None:
    message = parse_message_from_completion_text(GOOD, "thinking")
    assert message["tool_calls"][0]["function"] == {
        "name": "f",
        "arguments": '{"a": "x", "b": [1]}',
    }


@pytest.mark.parametrize(("mode", "begin"), [("chat", ""), ("thinking", "</think>")])
def test_a_completion_may_say_nothing(mode: str, begin: str) -> None:
    said = {"content": "", "reasoning_content": "", "tool_calls": []}
    assert parse_message_from_completion_text(begin + EOS, mode) == {"role": "assistant", **said}


def test_names_and_values_stand_as_the_model_wrote_them() -> None:
    text = GOOD.replace('"a"', '"ä"').replace(">x<", ">Malmö 🦆<").replace("[1]", "[ 1.0]")
    message = parse_message_from_completion_text(text, "thinking")
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"ä": "Malmö 🦆", "b": [ 1.0]}'


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (EOS, "", "missing end-of-sentence token"),
        (EOS, f"{EOS}x", "unexpected text after"),
        ("</think>", "", "missing </think>"),
        ("r</think>c\n\n<｜DSML｜tool_calls>", "r\n\n<｜DSML｜tool_calls>", "missing </think>"),
        ("r</think>", "<think>r</think>", "unexpected control token <think>"),
        ("r</think>", f"{EOS}r</think>", "unexpected control token <｜end▁of▁sentence｜>"),
        ("</think>c", "</think>c</think>", "unexpected control token </think>"),
        (
            "</think>c",
            "</think><｜begin▁of▁sentence｜>",
            "unexpected control token <｜begin▁of▁sentence｜>",
        ),
        ("c\n\n<", "c\n<", "unexpected control token ｜DSML｜"),
        ("tool_calls>\n<", "tool_calls><", "expected '>' and a newline in the tool calls"),
        ('name="f">\n', 'name="f">', "malformed head of a tool call"),
        (' name="f"', "", "malformed head of a tool call"),
        (' string="true"', "", "malformed parameter"),
        ('string="true"', 'string="yes"', "malformed parameter"),
        ('name="b"', 'name="a"', "parameter 'a' is given twice"),
        ("[1]", "[1", "value of parameter 'b' is not JSON"),
        ("[1]", "NaN", "value of parameter 'b' is not JSON"),
        ("[1]", "1e999", "value of parameter 'b' is not JSON"),
        ("[1]", r'"\ud83d"', "value of parameter 'b' is not JSON"),
        (
            "</｜DSML｜parameter>\n<",
            "</｜DSML｜parameter><",
            "expected '>' and a newline after parameter 'a'",
        ),
        ("</｜DSML｜invoke>\n", "", "missing </｜DSML｜invoke> of tool call 'f'"),
        ("</｜DSML｜tool_calls>", "", "missing </｜DSML｜tool_calls>"),
        ("</｜DSML｜tool_calls>", "</｜DSML｜tool_calls> ", "unexpected text after the tool calls"),
    ],
)
def test_deviations_are_refused_in_one_line(old: str, new: str, complaint: str) -> None:
    assert old in GOOD
    with pytest.raises(ValueError, match=complaint.replace("[", r"\[")) as error:
        parse_message_from_completion_text(GOOD.replace(old, new, 1), "thinking")
    assert "\n" not in str(error.value)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="thinking_mode is 'deep'"):
        parse_message_from_completion_text(EOS, "deep")
    not_text: Any = None
    with pytest.raises(ValueError, match="completion is NoneType"):
        parse_message_from_completion_text(not_text, "chat")


def test_chat_mode_has_no_reasoning_part() -> None:
    with pytest.raises(ValueError, match="unexpected control token </think>"):
        parse_message_from_completion_text(f"r</think>c{EOS}", "chat")


TEXT = st.text(alphabet='abc<>/"\n é{}', max_size=12)
NAMES = st.text(alphabet="abc_é<>/ ", min_size=1, max_size=5)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=3)


def messages_with(content: str, reasoning: str, calls: list[tuple[str, dict]]) -> list[dict]:
    tool_calls = [
        {
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for name, arguments in calls
    ]
    answer = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": tool_calls,
    }
    return [{"role": "user", "content": "q"}, answer]


@given(content=TEXT, reasoning=TEXT, calls=CALLS)
def test_what_the_encoder_writes_is_read_back(content: str, reasoning: str, calls: list) -> None:
    messages = messages_with(content, reasoning, calls)
    completion = encode_messages(messages[1:], "thinking", context=messages[:1])
    assert parse_message_from_completion_text(completion, "thinking") == messages[1]


@given(
    text=st.lists(
        st.sampled_from([GOOD[i : i + 9] for i in range(0, len(GOOD), 9)]), max_size=40
    ).map("".join)
)
def test_any_text_gives_a_message_or_a_value_error(text: str) -> None:
    try:
        message = parse_message_from_completion_text(text, "thinking")
    except ValueError:
        return
    for call in message["tool_calls"]:
        json.loads(call["function"]["arguments"])
