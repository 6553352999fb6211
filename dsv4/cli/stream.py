"""Token ids → text on stdout as it is produced, thinking and answer told apart."""

import json
from collections.abc import Iterable
from typing import TextIO

from dsv4.command.progress import StatusLine
from dsv4.encoding import (
    EOS,
    Completion,
    ContentDelta,
    Event,
    IncrementalDecoder,
    ReasoningDelta,
    StopStrings,
    StreamingParser,
    Tokenizer,
    ToolCallEnd,
    ToolCallStart,
    parse_completion,
)

DIM = "\x1b[2m"
RESET = "\x1b[0m"
UNKNOWN_TOKEN = "\ufffd"
# A model can be talked into writing escape sequences; a terminal gets to see them as U+FFFD.
CONTROL_CHARACTERS = {
    code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}
# JSON has them between values only, where a space means the same.
_LINE_BREAKS = {ord("\n"): " ", ord("\r"): " "}


class TokenText:
    """Text of a growing list of tokens up to the first of ``stops``; an id beyond the tokenizer's
    vocabulary becomes U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str] = ()) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopStrings(stops)

    @property
    def stop_string(self) -> str | None:
        """The string that has ended the text."""
        return self._stops.found

    def push(self, token_id: int) -> str:
        """The characters that this token completes, and none that may belong to a stop string."""
        try:
            return self._stops.push(self._decoder.push(token_id))
        except ValueError:
            return self._stops.push(self._decoder.flush() + UNKNOWN_TOKEN)

    def finish(self) -> str:
        """What was held back, U+FFFD for an unfinished character."""
        return self._stops.push(self._decoder.flush()) + self._stops.finish()


def text_of(tokenizer: Tokenizer, token_ids: Iterable[int], stops: Iterable[str] = ()) -> str:
    """The text of all of ``token_ids``, up to the first of ``stops``."""
    text = TokenText(tokenizer, stops)
    return "".join(map(text.push, token_ids)) + text.finish()


class PlainPrinter:
    """Writes text as it is, at once; on a terminal without control characters."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._replaced = CONTROL_CHARACTERS if out.isatty() else {}
        self._at_line_start = True

    def feed(self, text: str) -> None:
        """Writes ``text``."""
        if text:
            self.write_unchecked(text.translate(self._replaced))
            self._at_line_start = text.endswith("\n")

    def write_unchecked(self, text: str) -> None:
        """Writes what does not come from the model and leaves the cursor where it is."""
        try:
            self._out.write(text)
            self._out.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, "stdout") from None

    def start_line(self) -> None:
        """Ends the line, if one was begun."""
        if not self._at_line_start:
            self.feed("\n")

    def finish(self, stopped: bool) -> None:
        """Ends the text with a line break, whether or not the model ``stopped`` by itself."""
        self.start_line()


class ChatPrinter:
    """Writes a parsed completion: thinking, then the answer, every tool call as one line of JSON,
    one that is cut off as the model wrote it. While a call grows, ``status`` says so.

    Thinking is dimmed on a terminal and stands between lines ``<think>`` and ``</think>``
    elsewhere.
    """

    def __init__(
        self,
        out: TextIO,
        thinking_mode: str,
        tools: list[dict] | None,
        status: StatusLine,
    ) -> None:
        self._plain = PlainPrinter(out)
        self._status = status
        self._call: str | None = None  # the name of a call under way
        self._call_characters = 0
        self._parser = StreamingParser(thinking_mode, tools)
        self._is_terminal = out.isatty()
        self._in_thinking = False

    def feed(self, text: str) -> None:
        """Shows what ``text`` makes certain; half a marker is held back."""
        for event in self._parser.feed(text):
            self._show(event)
        if self._call is not None:
            self._call_characters += len(text)
            self._status.show(f"calling {self._call}: {self._call_characters:,} characters")

    def finish(self, stopped: bool) -> None:
        """Shows what was held back. Unless the model ``stopped`` by itself, a tool call at the end
        may be cut off.
        """
        if stopped:
            self.feed(EOS)
        for event in self._parser.finish():
            self._show(event)
        self._end_call()
        self._set_thinking(False)
        cut_off = self._parser.completion.cut_off
        if cut_off:
            self._plain.start_line()
            self._plain.feed(cut_off)
        self._plain.finish(stopped)

    def _show(self, event: Event) -> None:
        match event:
            case ReasoningDelta(text):
                self._set_thinking(True)
                self._plain.feed(text)
            case ContentDelta(text):
                self._set_thinking(False)
                self._plain.feed(text)
            case ToolCallStart(_, name):
                self._set_thinking(False)
                self._plain.start_line()
                self._call = name.translate(CONTROL_CHARACTERS)
            case ToolCallEnd(_, name, arguments):
                self._end_call()
                quoted = json.dumps(name, ensure_ascii=False)
                line = arguments.translate(_LINE_BREAKS)
                self._plain.feed(f'{{"name": {quoted}, "arguments": {line}}}\n')

    def _end_call(self) -> None:
        self._call = None
        self._call_characters = 0
        self._status.erase()

    def _set_thinking(self, thinking: bool) -> None:
        if thinking == self._in_thinking:
            return
        self._in_thinking = thinking
        self._plain.start_line()
        if self._is_terminal:
            self._plain.write_unchecked(DIM if thinking else RESET)
        else:
            self._plain.feed("<think>\n" if thinking else "</think>\n")


def make_printer(
    out: TextIO,
    thinking_mode: str | None,
    tools: list[dict] | None,
    status: StatusLine,
) -> PlainPrinter | ChatPrinter:
    """The printer for chat completions, or for plain text (``thinking_mode`` None)."""
    if thinking_mode is None:
        return PlainPrinter(out)
    return ChatPrinter(out, thinking_mode, tools, status)


def parse_answer(
    text: str, stopped: bool, thinking_mode: str | None, tools: list[dict] | None
) -> Completion:
    """The parsed completion; plain text (``thinking_mode`` None) is its content."""
    if thinking_mode is None:
        return Completion({"role": "assistant", "content": text}, (), stopped)
    return parse_completion(text + EOS if stopped else text, thinking_mode, tools)
