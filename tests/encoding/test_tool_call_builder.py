"""The arguments of one call, from its parameters: what is told early begins the whole text."""

import json

import pytest

from encoding.tool_call_builder import ToolCallBuilder, declared_parameters


def built(*parameters: tuple[str, str, str | None]) -> tuple[dict[str, object], list[str]]:
    """The arguments, and the repairs that were noted."""
    repairs: list[str] = []
    builder = ToolCallBuilder({}, repairs.append)
    told = "".join(builder.add(*parameter) for parameter in parameters)
    rest, whole = builder.close()
    assert told + rest == whole
    return json.loads(whole), repairs


def test_only_a_first_parameter_can_be_the_wrapper_of_all() -> None:
    first = ("arguments", '{"a": 2}', "false")
    assert built(first) == ({"a": 2}, ["wrapped_arguments"])
    assert built(("x", "1", "false"), first) == ({"x": 1, "arguments": {"a": 2}}, [])
    assert built(first, ("x", "1", "false")) == ({"arguments": {"a": 2}, "x": 1}, [])


@pytest.mark.parametrize("value", ["{", '{"a": NaN}'])
def test_a_wrapper_of_no_json_object_is_a_parameter(value: str) -> None:
    assert built(("input", value, "true")) == ({"input": value}, [])


def test_space_around_the_wrapped_object_is_left_out() -> None:
    assert built(("input", '\n{"a": 2} \n', "true")) == ({"a": 2}, ["wrapped_arguments"])


@pytest.mark.parametrize("parameters", [None, [], {"properties": None}, {"properties": ["x"]}])
def test_a_tool_whose_parameters_are_unclear_declares_none(parameters: object) -> None:
    assert declared_parameters([{"name": "f", "parameters": parameters}]) == {"f": {}}


@pytest.mark.parametrize(("attribute", "expected"), [("True", "5"), ("FALSE", 5)])
def test_whether_a_value_is_text_is_read_in_any_case(attribute: str, expected: object) -> None:
    assert built(("x", "5", attribute)) == ({"x": expected}, [])
