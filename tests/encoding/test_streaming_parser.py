"""The streaming parser gives the same however the text is split, and never shows half a marker
(model.md#parsing).
"""

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoding import (
    Completion,
    ContentDelta,
    Event,
    IncrementalDecoder,
    ReasoningDelta,
    StreamingParser,
    Tokenizer,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    encode_messages,
    parse_completion,
)
from encoding.dsml_tags import MAX_TAG_CHARACTERS
from tests.encoding.messages import HI
from tests.encoding.test_strict_parser import GOOD

EOS = "<｜end▁of▁sentence｜>"
FRAGMENTS = [
    *("r", "é", " ", "\n", "\n\n", "<", ">", '"', "'", "｜", "/"),
    *("</think>", "<think>", EOS, "<｜begin▁of▁sentence｜>"),
    *("<｜DSML｜tool_calls>", "<｜DSML｜tool_calls", "</｜DSML｜tool_calls>", "<|DSML|tool_calls>"),
    *("｜DSML｜", "<｜DSML｜"),
    *('<｜DSML｜invoke name="f">', '<｜DSML｜invoke name="g', "<｜DSML｜invoke>"),
    '<｜DSML｜invoke name="">',
    *("</｜DSML｜invoke>", "</|DSML|invoke>"),
    *('<｜DSML｜parameter name="a" string="true">', '<｜DSML｜parameter name="b" string="false">'),
    *('<｜DSML｜parameter name="arguments">', "[1", '{"q": 1}'),
    *("</｜DSML｜parameter>", "<｜DSML｜/parameter>", "</｜DSML｜parameter >"),
    *("<tool_calls>", '<tool_calls>\n<invoke name="h">', "<parameter name='x'>"),
    '<|DSML|tool_calls>\n<|DSML|invoke name="i">',
    *("</parameter>", "</invoke>", "</tool_calls>"),
    "x" * (MAX_TAG_CHARACTERS + 1),
]
COMPLETIONS = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)


def stream(parts: Iterable[str], mode: str) -> tuple[list[Event], Completion]:
    parser = StreamingParser(mode)
    events = [event for part in parts for event in parser.feed(part)]
    events += parser.finish()
    return events, parser.completion


def joined(events: list[Event]) -> list[tuple]:
    """The events with neighbouring deltas of the same kind put together."""
    result = []
    for (kind, index), group in itertools.groupby(
        events, key=lambda event: (type(event), getattr(event, "index", 0))
    ):
        if kind in (ReasoningDelta, ContentDelta, ToolCallArguments):
            result.append((kind, index, "".join(event.text for event in group)))  # type: ignore[union-attr]
        else:
            result.extend((kind, index, event) for event in group)
    return result


def text_of(events: list[Event], kind: type) -> str:
    return "".join(event.text for event in events if type(event) is kind)  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_split_anywhere_gives_the_same(mode: str) -> None:
    too_long = GOOD.replace('name="f"', f'name="{"f" * MAX_TAG_CHARACTERS}"')
    unmarked = GOOD.replace("｜DSML｜", "")
    spaced = unmarked.replace("<tool_calls>", f"<tool_calls>{' ' * 15}")  # and a line break
    for text in (
        GOOD,
        GOOD.replace("｜DSML｜", "|DSML|"),
        unmarked,
        spaced,
        spaced.replace("<tool_calls>", "<tool_calls> "),
        GOOD + GOOD,
        GOOD[:-30],
        too_long,
    ):
        events, completion = stream([text], mode)
        assert completion == parse_completion(text, mode)
        for cut in range(len(text)):
            parts = stream([text[:cut], text[cut:]], mode)
            assert (joined(parts[0]), parts[1]) == (joined(events), completion)


@given(text=COMPLETIONS, mode=st.sampled_from(["chat", "thinking"]), data=st.data())
def test_any_text_split_at_random_or_everywhere_gives_the_same(
    text: str, mode: str, data: st.DataObject
) -> None:
    events, completion = stream([text], mode)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    random_parts = [
        text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
    ]
    for parts in (random_parts, list(text)):
        other_events, other_completion = stream(parts, mode)
        assert other_completion == completion == parse_completion(text, mode)
        assert joined(other_events) == joined(events)


@given(text=COMPLETIONS, mode=st.sampled_from(["chat", "thinking"]))
def test_joined_deltas_are_the_final_message(text: str, mode: str) -> None:
    events, completion = stream(text, mode)
    assert text_of(events, ContentDelta) == completion.message["content"]
    assert text_of(events, ReasoningDelta) == completion.message["reasoning_content"]
    ended = [event for event in events if isinstance(event, ToolCallEnd)]
    assert [
        {"type": "function", "function": {"name": event.name, "arguments": event.arguments}}
        for event in ended
    ] == completion.message["tool_calls"]
    for event in ended:
        deltas = [
            e.text for e in events if isinstance(e, ToolCallArguments) and e.index == event.index
        ]
        assert "".join(deltas) == event.arguments
        assert ToolCallStart(event.index, event.name) in events
        json.loads(event.arguments)


@given(text=COMPLETIONS, mode=st.sampled_from(["chat", "thinking"]))
def test_every_message_can_be_sent_back(text: str, mode: str) -> None:
    """A chat goes on behind it, whatever the model has written."""
    message = parse_completion(text, mode).message
    results = [{"role": "tool", "content": "x"} for _ in message["tool_calls"]]
    encode_messages([HI, message, *results, HI], mode)


def test_no_event_ever_shows_a_piece_of_a_marker() -> None:
    text = GOOD.replace("r</think>c", "reason</think>content")
    for size in range(1, 40):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        events, _ = stream(parts, "thinking")
        assert text_of(events, ReasoningDelta) == "reason"
        assert text_of(events, ContentDelta) == "content"


def test_text_is_shown_as_soon_as_it_cannot_be_a_marker() -> None:
    parser = StreamingParser("thinking")
    assert parser.feed("a") == [ReasoningDelta("a")]
    assert parser.feed(" <") == [ReasoningDelta(" ")]
    assert parser.feed("/th") == []
    assert parser.feed("e>") == [ReasoningDelta("</the>")]
    assert parser.feed("</think>b\n\n") == [ContentDelta("b")]
    assert parser.feed("c") == [ContentDelta("\n\nc")]
    assert parser.feed("\n\n<｜DSML｜") == []
    assert text_of(parser.feed("no tag"), ContentDelta) == "\n\nno tag"
    assert parser.feed(" d\n\n<｜DSML｜inv") == [ContentDelta(" d")]


def test_a_tool_call_is_announced_and_its_arguments_follow_one_by_one() -> None:
    parser = StreamingParser("chat")
    events = [parser.feed(part + "\n") for part in GOOD.removeprefix("r</think>").split("\n")]
    flat = [event for group in events for event in group]
    assert flat == [
        ContentDelta("c"),
        ToolCallStart(0, "f"),
        ToolCallArguments(0, '{"a": "x"'),
        ToolCallArguments(0, ', "b": [1]'),
        ToolCallArguments(0, "}"),
        ToolCallEnd(0, "f", '{"a": "x", "b": [1]}'),
    ]
    assert events[3] == [ToolCallStart(0, "f")]
    assert events[4] == [ToolCallArguments(0, '{"a": "x"')]


def test_a_stray_marker_holds_text_back_only_for_the_length_of_a_tag() -> None:
    parser = StreamingParser("chat")
    quoted = '<｜DSML｜invoke name="' + "x" * (MAX_TAG_CHARACTERS - 30)
    assert parser.feed(quoted) == []
    assert text_of(parser.feed("y" * 30), ContentDelta).startswith('invoke name="xxx')


def test_long_values_are_searched_once() -> None:
    parser = StreamingParser("chat")
    parser.feed('<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">')
    for _ in range(2000):
        parser.feed("x < y\n")
    assert len(parser._scanner.text) < 100
    parser.feed(f"</｜DSML｜parameter></｜DSML｜invoke>{EOS}")
    parser.finish()
    arguments = json.loads(parser.completion.message["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"a": "x < y\n" * 2000}


def test_token_by_token_as_the_model_produces_it(tokenizer: Tokenizer) -> None:
    text = GOOD.replace("c\n\n", "你好 𝔘🙂\n\n")
    decoder = IncrementalDecoder(tokenizer)
    events, completion = stream(map(decoder.push, tokenizer.encode(text)), "thinking")
    assert completion == parse_completion(text, "thinking")
    assert text_of(events, ContentDelta) == "你好 𝔘🙂"


@pytest.mark.parametrize("text", [None, 5, b"text"])
def test_what_is_no_text_is_named(text: Any) -> None:
    with pytest.raises(ValueError, match=f"text is {type(text).__name__}, expected a string"):
        parse_completion(text, "chat")
