"""Calls that are cut off, have no name, or stand behind damaged ones, whole and in pieces."""

from collections.abc import Iterable

import pytest

from encoding import Completion, Event, StreamingParser, ToolCallArguments
from tests.encoding.completions import CALL, CLOSE, EOS, OPEN, calls, parse

# The value of the first call ends with a damaged tag, as is only known behind it.
DAMAGED = CALL.replace("</｜DSML｜parameter>", "</|DSML|parameter>")
CUT = CALL[: CALL.index(">x<") + 2]


def stream(parts: Iterable[str]) -> tuple[list[Event], Completion]:
    parser = StreamingParser("chat")
    events = [event for part in parts for event in parser.feed(part)]
    return events + parser.finish(), parser.completion


@pytest.mark.parametrize("first", ["", CALL, DAMAGED, CALL + DAMAGED])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_is_cut_off_begins_behind_the_last_whole_call(first: str, size: int) -> None:
    text = f"Hm.\n\n{OPEN}{first}{CUT}"
    _, completion = stream(text[at : at + size] for at in range(0, len(text), size))
    assert completion.cut_off == (CUT if first else f"{OPEN}{CUT}")
    assert len(calls(completion)) == first.count("<｜DSML｜invoke")


def test_a_call_without_a_name_tells_nothing_of_its_arguments() -> None:
    nameless = CALL.replace(' name="f"', "")
    events, completion = stream([f"\n\n{OPEN}{nameless}{CALL}{CLOSE}{EOS}"])
    assert calls(completion) == [("f", {"a": "x"})]
    assert {event.index for event in events if isinstance(event, ToolCallArguments)} == {0}


@pytest.mark.parametrize(
    ("begin", "end"),
    [("<parameter", "</parameter>"), ("<｜DSML｜parameter", "</|DSML|parameter>")],
)
def test_a_prescribed_value_behind_a_damaged_one_may_quote_damaged_tags(
    begin: str, end: str
) -> None:
    damaged = f'{begin} name="p" string="true">v{end}\n'
    quoting = CALL.replace(">x<", f">{end} ends it<").replace(
        "<｜DSML｜parameter", f"{damaged}<｜DSML｜parameter"
    )
    completion = parse(f"\n\n{OPEN}{quoting}{CLOSE}{EOS}", "chat")
    assert calls(completion) == [("f", {"p": "v", "a": f"{end} ends it"})]
    assert "unclosed_parameter" not in completion.repairs


def test_a_value_of_no_characters_may_end_with_a_damaged_tag() -> None:
    completion = parse(f"\n\n{OPEN}{DAMAGED.replace('>x<', '><')}{CALL}{CLOSE}{EOS}", "chat")
    assert calls(completion) == [("f", {"a": ""}), ("f", {"a": "x"})]
