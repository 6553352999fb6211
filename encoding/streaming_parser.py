"""Completion text → events, as it is produced (model.md#parsing). Accepts any text and says what it
had to mend.

Repairs and their names:

missing_eos                 the text ends without EOS, for instance at max_tokens
text_after_eos              ignored
missing_think_close         thinking mode without `</think>`: everything is reasoning
tool_block_in_reasoning     the tool calls count; the text after them is reasoning until `</think>`
stray_think_open, stray_think_close, stray_control_token    left out (BOS or the bare DSML marker)
reasoning_in_chat_mode      a `<think>` at the very beginning in chat mode
stray_dsml_tag              a prescribed tag where it has no meaning, left out
half_marker                 the text was cut off inside a tag, which is left out
newlines_before_tool_block  other than two
missing_tool_block_open     a call without `<｜DSML｜tool_calls>` around it
multiple_tool_blocks, text_after_tool_block, whitespace_after_tool_block
unclosed_tool_block, unclosed_tool_call, unclosed_parameter     ended by what follows
unfinished_tool_call        cut off before its end without EOS: left out, half a call is no call
tool_call_without_name, parameter_without_name    left out
ascii_bars, missing_dsml_marker, opening_tag_variant, closing_tag_variant
                            see `encoding.dsml_tags`
duplicate_parameter         the first one counts
missing_string_attribute    the value is JSON if it is valid JSON and its schema is not string
value_is_not_json           with string="false": taken as text
wrapped_arguments           the only parameter is named arguments or input, is not declared, and
                            holds a JSON object
json_instead_of_parameters  the call holds a JSON object without parameter tags
text_in_tool_call           left out

Text may quote tags with ASCII bars or without marker. They open a block only at the beginning of a
line, where `<tool_calls>` and a call by its name follow one another and there is such a tool; a
value that began with the prescribed tag ends with them only where no prescribed tag ends it.
"""

import re

from .completion import Completion, Event
from .completion_builder import CompletionBuilder
from .control_tokens import BOS, DSML, EOS, THINK_CLOSE, THINK_OPEN
from .dsml_tags import (
    MARKED_STARTS,
    PRESCRIBED_STARTS,
    Tag,
    may_become_tag,
    opens_block,
    read_tag,
)
from .messages import check_string, check_thinking_mode, parse_tools
from .scanner import Scanner
from .tool_block_parser import ToolBlockParser
from .tool_call_builder import declared_parameters

_UNMARKED_BLOCK = "<tool_calls>"
_MARKERS = (THINK_OPEN, THINK_CLOSE, EOS, BOS, *MARKED_STARTS, DSML, _UNMARKED_BLOCK)
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_BEGINNINGS = frozenset(marker[:length] for marker in _MARKERS for length in range(1, len(marker)))
_LONGEST_BEGINNING = max(map(len, _BEGINNINGS))
# Half a marker with a full-width bar is never ordinary text; "<" or "</th" may be.
_CONTROL_BEGINNING = re.compile("</?｜|｜D")


class StreamingParser:
    """Feed it text in pieces of any size: neither the final message nor the joined events depend on
    the split.

    Text that could be the beginning of a marker is held back until it is known not to be one. The
    line breaks in front of a tool block do not belong to the content, so up to two at the end are
    held back as well.
    """

    def __init__(
        self, thinking_mode: str, tools: list[dict] | None = None, reads_calls: bool = True
    ) -> None:
        """`tools`, in the OpenAI format, tell declared parameters from wrappers and damaged calls
        from text; None says nothing of them. `reads_calls` false: tool calls stay text. ValueError
        for a wrong argument.
        """
        check_thinking_mode(thinking_mode)
        self._chat_mode = thinking_mode == "chat"
        self._in_reasoning = thinking_mode == "thinking"
        self._reads_calls = reads_calls
        self._declared = declared_parameters(parse_tools(tools, "tools"))
        self._names = None if tools is None else self._declared.keys()
        self._scanner = Scanner()
        self._output = CompletionBuilder()
        self._text: list[str] = []
        # The character in front of the unused text; a line break where a part begins.
        self._before = "\n"
        self._block: ToolBlockParser | None = None
        self._block_count = 0
        # White space behind a tool block, as long as nothing else has followed.
        self._gap: str | None = None
        self._ended = False  # EOS was seen

    def feed(self, text: str) -> list[Event]:
        """The events that the new text makes certain. ValueError for what is no text."""
        check_string(text, "text")
        self._text.append(text)
        self._scanner.append(text)
        while self._step():
            pass
        return self._output.take_events()

    def finish(self) -> list[Event]:
        """The last events, after the last text. `completion` is final then."""
        self._scanner.final = True
        events = self.feed("")
        if self._block is not None:
            self._block.abandon()
            self._output.leave_out("".join(self._text)[self._block.whole_until :])
        if self._gap:
            self._output.note_repair("whitespace_after_tool_block")
        if self._in_reasoning:
            self._output.note_repair("missing_think_close")
        if not self._ended:
            self._output.note_repair("missing_eos")
        return events

    @property
    def completion(self) -> Completion:
        """The message as far as it is certain; final after `finish`."""
        return self._output.completion(self._ended)

    def _step(self) -> bool:
        """Uses some text; False if only more text, or its end, can tell how to go on."""
        scanner = self._scanner
        if self._ended:
            if not scanner.is_empty:
                self._output.note_repair("text_after_eos")
                scanner.advance_to(len(scanner.text))
            return False
        if self._block is not None:
            goes_on = self._block.step()
            if self._block.finished:
                self._block = None
                self._gap = ""
                self._before = "\n"
            return goes_on
        if self._gap is not None:
            self._gap += scanner.take_space()
        return not scanner.is_empty and self._in_text()

    def _in_text(self) -> bool:
        """Up to the next marker in reasoning or content."""
        scanner = self._scanner
        match = _MARKER.search(scanner.text, scanner.at)
        if match is None:
            self._emit_but_beginnings()
            return False
        marker = match[0]
        is_tag = marker in MARKED_STARTS or marker == _UNMARKED_BLOCK
        if is_tag and not self._reads_calls:
            self._emit_until(match.end())
            return True
        if marker in PRESCRIBED_STARTS:
            return self._at_tag(match.start(), match.end())
        if is_tag:
            return self._at_damaged_tag(match.start())
        self._emit_until(match.start())
        scanner.advance_to(match.end())
        self._before = "\n"
        self._handle_control_token(marker)
        return True

    def _handle_control_token(self, token: str) -> None:
        if token == EOS:
            self._ended = True
        elif token == THINK_CLOSE and self._in_reasoning:
            self._in_reasoning = False
            self._gap = None
        elif token == THINK_CLOSE:
            self._output.note_repair("stray_think_close")
        elif (
            token == THINK_OPEN
            and self._chat_mode
            and not self._in_reasoning
            and self._output.is_blank()
        ):
            self._in_reasoning = True
            self._output.note_repair("reasoning_in_chat_mode")
        elif token == THINK_OPEN:
            self._output.note_repair("stray_think_open")
        else:
            self._output.note_repair("stray_control_token")

    def _at_tag(self, start: int, marker_end: int) -> bool:
        scanner = self._scanner
        tag = read_tag(scanner.text, start)
        if tag is None and may_become_tag(scanner.text, start):
            return self._at_half_tag(start)
        if tag is None:
            self._emit_until(start)
            scanner.advance_to(marker_end)
            self._output.note_repair("stray_control_token")
        elif tag.name in ("tool_calls", "invoke") and not tag.closing:
            self._enter_block(tag)
        else:
            self._emit_until(start)
            scanner.advance_to(tag.end)
            self._output.note_repair("stray_dsml_tag")
        return True

    def _at_damaged_tag(self, start: int) -> bool:
        """A tag that opens a block, or text about such tags."""
        text = self._scanner.text
        before = text[start - 1] if start > self._scanner.at else self._before
        opens = before == "\n" and opens_block(text, start, self._names)
        if opens is None:
            return self._at_half_tag(start)
        tag = read_tag(text, start) if opens else None
        if tag is None:
            self._emit_until(start + 1)
        else:
            self._enter_block(tag)
        return True

    def _at_half_tag(self, start: int) -> bool:
        """What more text could make a tag is held back, and left out at the end."""
        scanner = self._scanner
        if not scanner.final:
            self._emit_until(self._before_line_breaks(start))
            return False
        self._emit_until(start)
        self._output.leave_out(scanner.take_until(len(scanner.text)))
        self._output.note_repair("half_marker")
        return True

    def _enter_block(self, tag: Tag) -> None:
        content_end = self._before_line_breaks(tag.start)
        self._emit_until(content_end)
        follows_a_block = self._gap is not None
        if not follows_a_block and tag.start - content_end != 2:
            self._output.note_repair("newlines_before_tool_block")
        if self._in_reasoning:
            self._output.note_repair("tool_block_in_reasoning")
        if self._block_count > 0:
            self._output.note_repair("multiple_tool_blocks")
        if tag.name == "invoke":
            self._output.note_repair("missing_tool_block_open")
        elif tag.repair is not None:
            self._output.note_repair(tag.repair)
        self._scanner.advance_to(tag.start)
        self._block = ToolBlockParser(self._scanner, self._output, self._declared)
        if tag.name != "invoke":
            self._scanner.advance_to(tag.end)
        self._gap = None
        self._block_count += 1

    def _emit_but_beginnings(self) -> None:
        """Emits the text, except for an end that could be the beginning of a marker."""
        scanner = self._scanner
        end = len(scanner.text)
        longest = min(_LONGEST_BEGINNING, end - scanner.at)
        beginning = next(
            (n for n in range(longest, 0, -1) if scanner.text[end - n :] in _BEGINNINGS), 0
        )
        start = end - beginning
        if not scanner.final:
            self._emit_until(self._before_line_breaks(start))
        elif _CONTROL_BEGINNING.match(scanner.text, start):
            self._emit_until(start)
            self._output.leave_out(scanner.take_until(end))
            self._output.note_repair("half_marker")
        else:
            self._emit_until(end)

    def _emit_until(self, end: int) -> None:
        text = self._scanner.text[self._scanner.at : end]
        self._scanner.advance_to(end)
        if not text:
            return
        self._before = text[-1]
        if self._gap is not None:
            self._output.note_repair("text_after_tool_block")
            if self._output.has_text(self._in_reasoning):
                text = self._gap + text
            self._gap = None
        self._output.add_text(text, self._in_reasoning)

    def _before_line_breaks(self, end: int) -> int:
        """`end` without up to two line breaks in front of it."""
        for _ in range(2):
            if end > self._scanner.at and self._scanner.text[end - 1] == "\n":
                end -= 1
        return end
