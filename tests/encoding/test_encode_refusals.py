"""Messages that no prompt can be made of: one line that names them, whatever the JSON."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoding import encode_messages
from tests.encoding.messages import HI, call

CYCLE: list = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hi", "messages is str, expected a list"),
        ({"role": "user"}, "messages is dict, expected a list"),
        (["hi"], r"messages\[0\] is str"),
        ([HI, {"content": "x"}], r"messages\[1\].role is None"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\]: unknown role 'robot'"),
        ([HI, HI, {"role": "robot"}], r"messages\[2\]: unknown role 'robot'"),
        ([{"role": "developer", "content": ""}], r"messages\[0\].content is missing or empty"),
        ([{"role": "developer"}], r"messages\[0\].content is missing or empty"),
        ([{"role": "latest_reminder"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is missing, a user message"),
        ([{"role": "user"}], r"messages\[0\].content is missing, a user message needs text"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is int"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] is not an object"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"content\[0\].text is int"),
        ([{"role": "user", "content_blocks": "x"}], "content_blocks is str"),
        ([{"role": "user", "content_blocks": ["x"]}], r"content_blocks\[0\] is not an object"),
        (
            [{"role": "user", "content_blocks": [{"text": "x"}]}],
            r"content_blocks\[0\] is not an object",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "tool_call_id is int"),
        ([{**HI, "task": "cook"}], r"messages\[0\].task is 'cook', expected one of action"),
        ([{**HI, "task": []}], r"messages\[0\].task is \[\]"),
        ([{"role": "system", "tools": {"name": "f"}}], r"messages\[0\].tools is dict"),
        ([{"role": "system", "tools": [{"name": "f"}]}], r'tools\[0\] has no object "function"'),
        ([{"role": "system", "tools": [{"function": {}}]}], r"tools\[0\].function.name is None"),
        (
            [{"role": "system", "tools": [{"function": {"name": ""}}]}],
            r"tools\[0\].function.name is '', expected a name",
        ),
        (
            [{"role": "system", "tools": [{"function": {"name": "f", "x": {1}}}]}],
            r"messages\[0\]: tool 'f' cannot be written as JSON",
        ),
        (
            [{"role": "system", "response_format": CYCLE}],
            r"messages\[0\].response_format cannot be written as JSON",
        ),
        ([{"role": "assistant", "tool_calls": {}}], "tool_calls is dict"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r'tool_calls\[0\] has no object "function"'),
        ([{"role": "assistant", "tool_calls": [{"function": 5}]}], 'has no object "function"'),
        ([{"role": "assistant", "tool_calls": [call(name=["f"])]}], "function.name is .'f'., exp"),
        ([{"role": "assistant", "tool_calls": [call(name="")]}], "function.name is '', expected a"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "function.name is None",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
            "arguments is NoneType",
        ),
        ([{"role": "assistant", "tool_calls": [call(arguments=[1])]}], "arguments is list"),
        (
            [{"role": "assistant", "tool_calls": [call(arguments={"x": {1}})]}],
            "arguments cannot be written as JSON",
        ),
        (
            [{"role": "system", "tools": [{"function": {"name": "f", "x": math.nan}}]}],
            "tool 'f' cannot be written as JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [call(arguments={"x": -math.inf})]}],
            "arguments cannot be written as JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [call(arguments='{"x": NaN}')]}],
            r"messages\[0\].tool_calls\[0\].function.arguments cannot be written as JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [call(arguments=r'{"x": "\ud83d"}')]}],
            r"messages\[0\].tool_calls\[0\].function.arguments cannot be written as JSON",
        ),
        ([{"role": "assistant", "reasoning_content": ["r"]}], "reasoning_content is list"),
        (
            [HI, {"role": "assistant", "content": "a", "wo_eos": "false"}],
            r"messages\[1\].wo_eos is 'false', expected true or false",
        ),
    ],
)
def test_wrong_messages_are_refused_in_one_line_that_names_them(
    messages: Any, complaint: str
) -> None:
    with pytest.raises(ValueError, match=rf"^(?s:.*){complaint}") as error:
        encode_messages(messages, "chat")
    assert "\n" not in str(error.value)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="thinking_mode is 'deep', expected 'chat' or 'thinking'"):
        encode_messages([HI], "deep")
    with pytest.raises(ValueError, match=r"context\[0\].role"):
        encode_messages([HI], "chat", context=[{}])
    effort: Any = []
    with pytest.raises(ValueError, match=r"reasoning_effort is \[\], expected None or one of"):
        encode_messages([HI], "chat", reasoning_effort=effort)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
ROLES = ["system", "user", "assistant", "tool", "developer", "latest_reminder", "robot"]
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.text(max_size=3) | JSON_VALUES},
    optional={"arguments": JSON_VALUES | st.text(max_size=9)},
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_result", "image", 1])},
    optional={"text": JSON_VALUES, "content": JSON_VALUES, "tool_use_id": JSON_VALUES},
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES)},
    optional={
        "content": st.text(max_size=9) | JSON_VALUES | st.lists(PARTS, max_size=2),
        "content_blocks": st.lists(PARTS, max_size=2) | JSON_VALUES,
        "reasoning_content": st.text(max_size=9) | JSON_VALUES,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"function": FUNCTIONS}, optional={"id": JSON_VALUES}), max_size=2
        )
        | JSON_VALUES,
        "tools": st.lists(st.fixed_dictionaries({"function": FUNCTIONS | JSON_VALUES}), max_size=2)
        | JSON_VALUES,
        "response_format": JSON_VALUES,
        "tool_call_id": JSON_VALUES,
        "task": st.sampled_from([None, "action", "title", "cook"]) | JSON_VALUES,
        "wo_eos": JSON_VALUES,
    },
)


@given(
    messages=st.lists(MESSAGES | JSON_VALUES, max_size=4) | JSON_VALUES,
    mode=st.sampled_from(["chat", "thinking", "", None]),
    context=st.none() | st.lists(MESSAGES, max_size=2) | JSON_VALUES,
    effort=st.sampled_from([None, "low", "high", "max", 3]) | JSON_VALUES,
    profile=st.sampled_from(["preview", "official", "x"]) | JSON_VALUES,
)
def test_any_json_gives_a_prompt_or_a_value_error(
    messages: Any, mode: Any, context: Any, effort: Any, profile: Any
) -> None:
    try:
        prompt = encode_messages(
            messages, mode, context=context, reasoning_effort=effort, profile=profile
        )
    except ValueError as error:
        prompt = str(error)
        assert "\n" not in prompt
    assert isinstance(prompt, str)


def test_deeply_nested_values_are_refused_or_kept_raw() -> None:
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        encode_messages([{"role": "system", "response_format": deep}], "chat")
    raw = "[" * 100_000
    message = {"role": "assistant", "tool_calls": [call(arguments=raw)]}
    assert raw in encode_messages([message], "chat")
    assert json.dumps(raw) not in encode_messages([message], "chat")
