"""Rules of the prompt format that the recorded vectors do not reach (model.md#messages,
model.md#rendering).
"""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoding import encode_messages

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HI = {"role": "user", "content": "hi"}


def call(name: str = "f", arguments: Any = "{}", call_id: str | None = None) -> dict:
    result: dict = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return result if call_id is None else {"id": call_id, **result}


def body(messages: list[dict], thinking_mode: str = "chat", **options: Any) -> str:
    return encode_messages(messages, thinking_mode, **options).removeprefix(BOS)


def test_neighbouring_user_and_tool_messages_are_one_turn() -> None:
    messages = [
        {"role": "tool", "content": "R"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    assert body(messages) == f"{USER}<tool_result>R</tool_result>\n\na\n\nb{ASSISTANT}</think>"


def test_a_user_message_does_not_join_a_turn_with_a_task_but_a_tool_result_does() -> None:
    task = {"role": "user", "content": "a", "task": "query"}
    assert body([task, HI]) == f"{USER}a{USER}hi{ASSISTANT}</think>"
    assert (
        body([task, {"role": "tool", "content": "R"}])
        == f"{USER}a\n\n<tool_result>R</tool_result><｜query｜>"
    )


def test_tool_results_are_sorted_by_call_and_texts_keep_their_places() -> None:
    messages = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call(call_id="x"), call(call_id="y"), call(call_id="z")],
        },
        {"role": "tool", "content": "Z", "tool_call_id": "z"},
        {"role": "user", "content": "text"},
        {"role": "tool", "content": "?", "tool_call_id": "unknown"},
        {"role": "tool", "content": "Y", "tool_call_id": "y"},
        {"role": "tool", "content": "X", "tool_call_id": "x"},
    ]
    results = body(messages).split(USER)[1].removesuffix(f"{ASSISTANT}</think>")
    expected = ["<tool_result>?</tool_result>", "text"]
    expected += [f"<tool_result>{name}</tool_result>" for name in "XYZ"]
    assert results == "\n\n".join(expected)


def test_tool_result_parts_are_joined_and_other_parts_named() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "b"},
    ]
    expected = "a\n\n[Unsupported image_url]\n\nb"
    assert f"<tool_result>{expected}</tool_result>" in body([{"role": "tool", "content": parts}])
    assert body([{"role": "user", "content": parts}]) == f"{USER}{expected}{ASSISTANT}</think>"


def test_content_blocks_of_a_user_message_are_rendered_as_given() -> None:
    blocks = [
        {"type": "text", "text": "a"},
        {"type": "tool_result", "tool_use_id": "x", "content": "R"},
    ]
    expected = f"{USER}a\n\n<tool_result>R</tool_result>{ASSISTANT}</think>"
    assert body([{"role": "user", "content_blocks": blocks}]) == expected


def test_old_reasoning_and_developer_messages_are_dropped_before_the_last_user_message() -> None:
    messages = [
        {"role": "developer", "content": "D"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "alien", "content": "dropped as well"},
        HI,
        {"role": "assistant", "content": "b", "reasoning_content": "s"},
    ]
    assert body(messages, "thinking") == f"a{EOS}{USER}hi{ASSISTANT}<think>s</think>b{EOS}"


def test_reminders_and_the_last_developer_message_survive_the_dropping() -> None:
    messages = [
        {"role": "latest_reminder", "content": "today"},
        {"role": "developer", "content": "D"},
    ]
    assert body(messages, "thinking") == f"<｜latest_reminder｜>today{USER}D{ASSISTANT}<think>"


def test_reasoning_is_kept_on_request() -> None:
    messages = [HI, {"role": "assistant", "content": "a", "reasoning_content": "r"}, HI]
    expected = f"{USER}hi{ASSISTANT}<think>r</think>a{EOS}{USER}hi{ASSISTANT}<think>"
    assert body(messages, "thinking", drop_thinking=False) == expected


def test_a_user_turn_in_a_row_of_turns_gets_no_generation_prompt_before_a_system_message() -> None:
    assert body([HI, {"role": "system", "content": "S"}]) == f"{USER}hiS"


def test_arguments_that_are_no_json_object_become_one_raw_parameter() -> None:
    for raw in ("{bad", "", "[1, 2]", "null", "5"):
        prompt = body([{"role": "assistant", "content": None, "tool_calls": [call(arguments=raw)]}])
        assert (
            f'\n<｜DSML｜parameter name="arguments" string="true">{raw}</｜DSML｜parameter>\n'
            in prompt
        )


def test_a_call_without_arguments_has_an_empty_line() -> None:
    prompt = body([{"role": "assistant", "content": "", "tool_calls": [call()]}])
    assert '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>' in prompt


def test_context_is_left_out_and_the_rest_continues_it() -> None:
    context = [{"role": "system", "content": "S", "tools": [TOOL]}, HI]
    messages = [
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "b"},
    ]
    whole = encode_messages(context + messages, "thinking", reasoning_effort="max")
    rest = encode_messages(messages, "thinking", context=context, reasoning_effort="max")
    assert rest == f"r</think>a{EOS}{USER}b{ASSISTANT}<think>"
    assert whole.endswith(rest)
    assert whole == encode_messages(context, "thinking", reasoning_effort="max") + rest


def test_tools_in_the_context_keep_old_reasoning() -> None:
    messages = [HI, {"role": "assistant", "content": "a", "reasoning_content": "r"}, HI]
    context = [{"role": "system", "content": "S", "tools": [TOOL]}]
    assert "<think>r</think>a" in encode_messages(messages, "thinking", context=context)


def test_system_message_with_tools_and_response_format() -> None:
    message = {
        "role": "system",
        "content": None,
        "tools": [TOOL, TOOL],
        "response_format": {"é": [1, None, True]},
    }
    prompt = body([message])
    schema = '{"name": "f", "parameters": {"type": "object"}}'
    assert prompt.startswith("\n\n## Tools\n\n")
    assert f"### Available Tool Schemas\n\n{schema}\n{schema}\n\nYou MUST" in prompt
    assert prompt.endswith(
        "to invoke tool calls.\n\n\n## Response Format:\n\n"
        'You MUST strictly adhere to the following schema to reply:\n{"é": [1, null, true]}'
    )


def test_no_messages_are_an_empty_prompt() -> None:
    assert encode_messages([], "thinking", reasoning_effort="max") == BOS
    assert encode_messages([], "thinking", add_default_bos_token=False) == ""


@pytest.mark.parametrize("task", ["query", "authority", "domain", "read_url"])
def test_quick_instruction_on_a_user_message(task: str) -> None:
    for mode in ("chat", "thinking"):
        assert body([{**HI, "task": task}], mode) == f"{USER}hi<｜{task}｜>"


def test_action_task_opens_the_assistant_turn_in_both_modes() -> None:
    assert body([{**HI, "task": "action"}], "chat") == f"{USER}hi{ASSISTANT}</think><｜action｜>"
    assert body([{**HI, "task": "action"}], "thinking") == f"{USER}hi{ASSISTANT}<think><｜action｜>"


def test_answers_to_tasks_have_no_thinking_part() -> None:
    title = [
        HI,
        {"role": "assistant", "content": "yo", "task": "title"},
        {"role": "assistant", "content": "Greeting"},
    ]
    expected = f"{USER}hi{ASSISTANT}<think></think>yo{EOS}<｜title｜>Greeting{EOS}"
    assert body(title, "thinking") == expected
    action = [{**HI, "task": "action"}, {"role": "assistant", "content": "Search"}]
    assert body(action, "thinking") == f"{USER}hi{ASSISTANT}<think><｜action｜>Search{EOS}"


def test_read_url_task_with_a_url_written_by_the_caller() -> None:
    message = {"role": "user", "content": "see<｜extracted_url｜>http://x", "task": "read_url"}
    expected = f"{USER}see<｜extracted_url｜>http://x<｜read_url｜>"
    assert body([message], neutralize_control_tokens=False) == expected


def test_messages_are_not_changed() -> None:
    messages = [
        {"role": "system", "content": "S", "tools": [TOOL]},
        {"role": "assistant", "content": "", "tool_calls": [call(call_id="a"), call(call_id="b")]},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
    ]
    before = copy.deepcopy(messages)
    encode_messages(messages, "thinking")
    assert messages == before


CYCLE: list = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hi", "messages is str, expected a list"),
        ({"role": "user"}, "messages is dict, expected a list"),
        (["hi"], r"messages\[0\] is str"),
        ([HI, {"content": "x"}], r"messages\[1\].role is None"),
        ([{"role": "robot", "content": "x"}], "unknown role 'robot'"),
        ([{"role": "developer", "content": ""}], r"messages\[0\].content is missing or empty"),
        ([{"role": "developer"}], r"messages\[0\].content is missing or empty"),
        ([{"role": "latest_reminder"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is int"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] is not an object"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"content\[0\].text is int"),
        ([{"role": "user", "content_blocks": "x"}], "content_blocks is str"),
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
            [{"role": "system", "tools": [{"function": {"name": "f", "x": {1}}}]}],
            "tool 'f' cannot be written as JSON",
        ),
        (
            [{"role": "system", "response_format": CYCLE}],
            "response_format cannot be written as JSON",
        ),
        ([{"role": "assistant", "tool_calls": {}}], "tool_calls is dict"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r'tool_calls\[0\] has no object "function"'),
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
        ([{"role": "assistant", "reasoning_content": ["r"]}], "reasoning_content is list"),
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
