"""Rules of the prompt format that the recorded vectors do not reach (model.md#messages,
model.md#rendering).
"""

import copy
from typing import Any

import pytest

from encoding import encode_messages
from tests.encoding.messages import HI, call

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


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


def test_a_tool_result_brings_no_task_into_its_turn() -> None:
    made = {"role": "assistant", "tool_calls": [call()]}
    result = {"role": "tool", "content": "R"}
    assert body([made, {**result, "task": "query"}]) == body([made, result])


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


def test_a_call_may_have_its_id_in_its_function() -> None:
    functions = [{"id": one, "name": "f", "arguments": "{}"} for one in "ab"]
    made = {"role": "assistant", "tool_calls": [{"function": one} for one in functions]}
    given = [{"role": "tool", "content": one.upper(), "tool_call_id": one} for one in "ba"]
    assert body([made, *given]) == body([made, *reversed(given)])


def test_results_among_the_blocks_of_a_user_are_sorted_too() -> None:
    made = {"role": "assistant", "tool_calls": [call(call_id=one) for one in "ab"]}
    blocks = [{"type": "tool_result", "tool_use_id": one, "content": one.upper()} for one in "ba"]
    results = body([made, {"role": "user", "content_blocks": blocks}]).split(USER)[1]
    assert results.startswith("<tool_result>A</tool_result>\n\n<tool_result>B</tool_result>")


def test_a_result_of_an_unknown_call_sorts_with_that_of_the_first() -> None:
    made = {"role": "assistant", "content": "", "tool_calls": [call(call_id=one) for one in "ab"]}
    given = [{"role": "tool", "content": one.upper(), "tool_call_id": one} for one in "bax"]
    results = body([made, *given]).split(USER)[1].removesuffix(f"{ASSISTANT}</think>")
    assert results == "\n\n".join(f"<tool_result>{name}</tool_result>" for name in "AXB")


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


def test_a_reminder_stands_behind_what_asks_for_an_answer() -> None:
    messages = [HI, {"role": "latest_reminder", "content": "today"}]
    assert body(messages, "chat") == f"{USER}hi{ASSISTANT}</think><｜latest_reminder｜>today"


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


def test_the_task_of_the_last_message_says_nothing_of_the_first() -> None:
    answer = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    task = {"role": "user", "content": "q", "task": "query"}
    assert body([answer, task], "thinking", drop_thinking=False).startswith(f"r</think>a{EOS}")


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
