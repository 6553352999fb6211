"""Parameters of tool calls as models really write them (model.md#parsing)."""

import pytest

from encoding import encode_messages
from tests.encoding.completions import CALL, CLOSE, EOS, OPEN, calls, parse


def call_with(*parameters: str) -> str:
    return (
        f'\n\n{OPEN}<｜DSML｜invoke name="f">\n'
        + "".join(parameters)
        + f"</｜DSML｜invoke>\n{CLOSE}{EOS}"
    )


def parameter(name: str, value: str, string: str | None = "true") -> str:
    attribute = "" if string is None else f' string="{string}"'
    return f'<｜DSML｜parameter name="{name}"{attribute}>{value}</｜DSML｜parameter>\n'


@pytest.mark.parametrize("name", ["arguments", "input"])
@pytest.mark.parametrize("string", ["true", "false", None])
def test_a_parameter_that_wraps_the_arguments_is_unwrapped(name: str, string: str | None) -> None:
    completion = parse(call_with(parameter(name, '{"q": [1]}', string)), "chat")
    assert calls(completion) == [("f", {"q": [1]})]
    assert "wrapped_arguments" in completion.repairs


def test_what_only_looks_like_a_wrapper_is_kept() -> None:
    wrapper = parameter("input", '{"q": 1}')
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"input": {}}}}}
    ]
    assert calls(parse(call_with(wrapper), "chat", tools)) == [("f", {"input": '{"q": 1}'})]
    two = call_with(wrapper, parameter("b", "y"))
    assert calls(parse(two, "chat")) == [("f", {"input": '{"q": 1}', "b": "y"})]
    assert calls(parse(call_with(parameter("input", "plain")), "chat")) == [
        ("f", {"input": "plain"})
    ]
    assert calls(parse(call_with(parameter("input", "[1]", "false")), "chat")) == [
        ("f", {"input": [1]})
    ]


def test_json_instead_of_parameters() -> None:
    completion = parse(call_with('{"q": 1}\n'), "chat")
    assert calls(completion) == [("f", {"q": 1})]
    assert completion.repairs == ("json_instead_of_parameters",)
    assert calls(parse(call_with("nonsense"), "chat")) == [("f", {})]
    both = parse(call_with(parameter("a", "x"), '{"q": 1}\n'), "chat")
    assert calls(both) == [("f", {"a": "x"})]
    assert both.repairs == ("text_in_tool_call",)


def test_missing_string_attribute_takes_json_where_the_schema_allows_it() -> None:
    text = call_with(
        parameter("n", "5", None), parameter("s", "5", None), parameter("t", "a b", None)
    )
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    ]
    completion = parse(text, "chat", tools)
    assert calls(completion) == [("f", {"n": 5, "s": "5", "t": "a b"})]
    assert completion.repairs == ("missing_string_attribute",)
    assert calls(parse(text, "chat")) == [("f", {"n": 5, "s": 5, "t": "a b"})]


@pytest.mark.parametrize(
    "value",
    ["[1", "NaN", "", "text", "[" * 5000, "1e999", "[-1e999]", r'"\ud83d"', r'{"\udc00": 1}'],
)
def test_a_value_that_is_not_json_becomes_text(value: str) -> None:
    completion = parse(call_with(parameter("a", value, "false")), "chat")
    assert calls(completion) == [("f", {"a": value})]
    assert completion.repairs == ("value_is_not_json",)
    # The next turn of the conversation has the call in its prompt.
    encode_messages([completion.message], "chat").encode("utf-8")


def test_the_first_of_two_equal_parameters_counts() -> None:
    completion = parse(call_with(parameter("a", "x"), parameter("a", "y")), "chat")
    assert calls(completion) == [("f", {"a": "x"})]
    assert completion.repairs == ("duplicate_parameter",)


@pytest.mark.parametrize(
    "value",
    [
        "</parameter>",
        "<a></parameter>\n</invoke></a>",
        "</think>",
        "a < b > c",
        "<｜x｜>\n",
        "a<｜DSML｜tool_calls>b",
    ],
)
def test_only_the_prescribed_tag_ends_a_value(value: str) -> None:
    completion = parse(call_with(parameter("a", value)), "chat")
    assert calls(completion) == [("f", {"a": value})]
    assert completion.repairs == ()


def test_a_stray_tag_does_not_end_a_call() -> None:
    text = call_with(
        parameter("a", "x"), "</｜DSML｜parameter>\n<｜DSML｜tool_calls>\n", parameter("b", "y")
    )
    completion = parse(text, "chat")
    assert calls(completion) == [("f", {"a": "x", "b": "y"})]
    assert completion.repairs == ("stray_dsml_tag",)


def test_calls_and_parameters_without_name_are_left_out() -> None:
    for name in ("", ' name=""'):
        nameless = CALL.replace(' name="f"', name)
        completion = parse(f"\n\n{OPEN}{nameless}{CALL}{CLOSE}{EOS}", "chat")
        assert calls(completion) == [("f", {"a": "x"})]
        assert completion.repairs[0] == "tool_call_without_name"
    completion = parse(
        call_with('<｜DSML｜parameter string="true">x</｜DSML｜parameter>\n'), "chat"
    )
    assert calls(completion) == [("f", {})]
    assert completion.repairs == ("parameter_without_name",)
