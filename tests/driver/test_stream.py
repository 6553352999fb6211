"""What a reader sees of a completion: thinking apart from the answer, tool calls, no half
characters or markers.
"""

import io
import json

import pytest

from dsv4.cli.stream import (
    DIM,
    RESET,
    ChatPrinter,
    PlainPrinter,
    TokenText,
    make_printer,
    parse_answer,
    text_of,
)
from dsv4.command.progress import ERASE_LINE, StatusLine
from dsv4.demo import CHECKPOINT
from encoding import Tokenizer

CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Malmö</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)

# Nobody looks at this one.
QUIET = StatusLine(io.StringIO(), False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(CHECKPOINT)


def shown(out: io.StringIO, mode: str, text: str, stopped: bool = True, pieces: int = 1) -> str:
    printer = ChatPrinter(out, mode, None, QUIET)
    for start in range(0, len(text), pieces):
        printer.feed(text[start : start + pieces])
    printer.finish(stopped)
    return out.getvalue()


def test_thinking_stands_between_markers_where_there_is_no_terminal() -> None:
    assert (
        shown(io.StringIO(), "thinking", "I add.</think>Four.")
        == "<think>\nI add.\n</think>\nFour.\n"
    )


def test_thinking_is_dimmed_on_a_terminal() -> None:
    assert shown(Terminal(), "thinking", "I add.</think>Four.") == f"{DIM}I add.\n{RESET}Four.\n"


def test_terminal_is_left_undimmed_when_thinking_is_cut_off() -> None:
    assert shown(Terminal(), "thinking", "I add", stopped=False) == f"{DIM}I add\n{RESET}"


def test_terminal_never_gets_control_characters_of_the_model() -> None:
    assert shown(Terminal(), "chat", "a\x1b[2Jb\x9bc\td\r") == "a\ufffd[2Jb\ufffdc\td\ufffd\n"
    assert shown(io.StringIO(), "chat", "a\x1b[2J") == "a\x1b[2J\n"


def test_chat_answer_is_shown_as_it_is() -> None:
    assert shown(io.StringIO(), "chat", "Two\nlines\n") == "Two\nlines\n"


def test_tool_call_is_one_line_of_json() -> None:
    lines = shown(io.StringIO(), "chat", "I look." + CALL).splitlines()
    assert lines[0] == "I look."
    assert json.loads(lines[1]) == {"name": "get_weather", "arguments": {"city": "Malmö"}}
    assert len(lines) == 2


def test_arguments_that_the_model_wrote_over_several_lines_are_one_line() -> None:
    text = CALL.replace('string="true">Malmö<', 'string="false">{\n  "a": [1,\r\n 2]\n}<')
    line, *rest = shown(io.StringIO(), "chat", text).splitlines()
    assert json.loads(line) == {"name": "get_weather", "arguments": {"city": {"a": [1, 2]}}}
    assert rest == []


@pytest.mark.parametrize("end", [len(CALL) - 40, 60, 30])
def test_tool_call_that_was_cut_off_is_shown_as_it_was_written(end: int) -> None:
    cut = CALL[:end]
    found = shown(io.StringIO(), "chat", "I look." + cut, stopped=False)
    assert found == f"I look.\n{cut.strip()}\n"
    assert shown(io.StringIO(), "chat", cut, stopped=False) == f"{cut.strip()}\n"
    assert shown(io.StringIO(), "chat", CALL[:8], stopped=False).strip() == "<｜DSML"


def test_whole_calls_before_one_that_was_cut_off_are_shown_as_calls() -> None:
    second = '\n<｜DSML｜invoke name="get_time">\n<｜DSML｜par'
    text = CALL.removesuffix("\n</｜DSML｜tool_calls>") + second
    call, cut, parameter = shown(io.StringIO(), "chat", text, stopped=False).splitlines()
    assert json.loads(call)["name"] == "get_weather"
    assert f"\n{cut}\n{parameter}" == second
    answer = parse_answer(text, False, "chat", None)
    assert answer.cut_off == second.strip()
    assert [call["function"]["name"] for call in answer.message["tool_calls"]] == ["get_weather"]
    assert "unfinished_tool_call" in answer.repairs


def test_a_call_that_the_model_itself_left_open_is_shown_as_a_call() -> None:
    text = CALL[: CALL.index("\n</｜DSML｜invoke>")].replace("get_weather", "météo")
    found = shown(io.StringIO(), "chat", text)
    assert found == '{"name": "météo", "arguments": {"city": "Malmö"}}\n'
    [call] = parse_answer(text, True, "chat", None).message["tool_calls"]
    assert call["function"] == {"name": "météo", "arguments": '{"city": "Malmö"}'}
    assert shown(io.StringIO(), "chat", text, stopped=False) == f"{text.strip()}\n"


def test_a_call_behind_the_thinking_is_no_part_of_it() -> None:
    think, thought, end, call = shown(io.StringIO(), "thinking", f"Hm.</think>{CALL}").splitlines()
    assert (think, thought, end) == ("<think>", "Hm.", "</think>")
    assert json.loads(call)["name"] == "get_weather"


def test_a_call_under_way_is_shown_on_the_status_line() -> None:
    out = io.StringIO()
    terminal = Terminal()
    printer = ChatPrinter(out, "chat", None, StatusLine(terminal, True))
    printer.feed("I look." + CALL[:70])
    assert (out.getvalue(), terminal.getvalue()) == (
        "I look.\n",
        f"{ERASE_LINE}calling get_weather: 77 characters",
    )
    printer.feed(CALL[70:])
    assert terminal.getvalue().endswith(ERASE_LINE)
    assert out.getvalue().endswith("}\n")


def test_every_call_is_counted_by_itself_and_one_that_is_cut_off_leaves_no_status_line() -> None:
    terminal = Terminal()
    printer = ChatPrinter(io.StringIO(), "chat", None, StatusLine(terminal, True))
    printer.feed(CALL[:70])
    printer.feed(CALL[70:].removesuffix("\n</｜DSML｜tool_calls>"))
    second = '\n<｜DSML｜invoke name="get_time">\n'
    printer.feed(second)
    assert terminal.getvalue().endswith(f"calling get_time: {len(second)} characters")
    printer.finish(False)
    assert terminal.getvalue().endswith(ERASE_LINE)


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_pieces_show_the_same_as_the_whole(pieces: int) -> None:
    text = "Because.</think>I look." + CALL
    assert shown(io.StringIO(), "thinking", text, pieces=pieces) == shown(
        io.StringIO(), "thinking", text, pieces=999
    )


def test_half_a_marker_is_held_back_until_the_end() -> None:
    out = io.StringIO()
    printer = ChatPrinter(out, "thinking", None, QUIET)
    printer.feed("Hm.</thi")
    assert out.getvalue() == "<think>\nHm."
    printer.finish(False)
    assert out.getvalue() == "<think>\nHm.</thi\n</think>\n"


def test_characters_split_over_tokens_are_never_broken(tokenizer: Tokenizer) -> None:
    text = "naïve 🦆 漢字 Ελλάδα"
    stream = TokenText(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert "\ufffd" not in "".join(pieces)
    assert len(pieces) > len(text)


def test_unfinished_character_and_unknown_token_are_replacement_characters(
    tokenizer: Tokenizer,
) -> None:
    duck = tokenizer.encode("🦆")
    assert text_of(tokenizer, duck[:-1]) == "\ufffd"
    assert text_of(tokenizer, [*duck, tokenizer.vocab_size + 5, *duck]) == "🦆\ufffd🦆"
    torn = [*duck[:-1], tokenizer.vocab_size + 5, duck[-1]]
    assert text_of(tokenizer, torn) == "\ufffd\ufffd\ufffd"


def test_plain_text_keeps_control_tokens_and_ends_its_line() -> None:
    out = io.StringIO()
    printer = make_printer(out, None, None, QUIET)
    printer.feed("a</think>b")
    printer.finish(True)
    assert isinstance(printer, PlainPrinter)
    assert out.getvalue() == "a</think>b\n"
    assert isinstance(make_printer(out, "chat", None, QUIET), ChatPrinter)


def test_plain_text_is_there_at_once_and_its_line_ends_once() -> None:
    written = io.BytesIO()
    printer = PlainPrinter(io.TextIOWrapper(written, "utf-8"))
    printer.feed("a\n")
    assert written.getvalue() == b"a\n"
    printer.feed("")
    printer.finish(True)
    assert written.getvalue() == b"a\n"


def test_message_of_a_completion() -> None:
    message = parse_answer("Why.</think>I look." + CALL, True, "thinking", None).message
    assert (message["reasoning_content"], message["content"]) == ("Why.", "I look.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    assert parse_answer("a</think>", True, None, None).message == {
        "role": "assistant",
        "content": "a</think>",
    }
