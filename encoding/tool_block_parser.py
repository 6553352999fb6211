"""One block of tool calls, read from a scanner step by step (model.md#parsing)."""

from collections.abc import Mapping

from .completion_builder import CompletionBuilder
from .dsml_tags import (
    MAX_START_CHARACTERS,
    Marker,
    Tag,
    find_tag_start,
    may_become_tag,
    read_tag,
)
from .scanner import Scanner
from .tool_call_builder import ToolCallBuilder

_UNMARKED_CLOSE = "</parameter>"


class ToolBlockParser:
    """Reads from behind `<｜DSML｜tool_calls>`, or from a call without it, until the block is
    `finished`.

    `step` returns False if only more text, or its end, can tell how to go on. The block also ends
    before EOS and before text that belongs to no call; both are left to the caller.
    """

    def __init__(
        self,
        scanner: Scanner,
        output: CompletionBuilder,
        declared: Mapping[str, Mapping[str, object]],
    ) -> None:
        self.finished = False
        # Where the block begins, or what follows its last whole call.
        self.whole_until = scanner.position
        self._scanner = scanner
        self._output = output
        self._declared = declared
        self._call: _OpenCall | None = None
        self._parameter: Tag | None = None
        self._value: list[str] = []  # what is certain of the value of `_parameter`
        self._ending = Marker.PRESCRIBED  # tags that may end the value in hand

    def step(self) -> bool:
        """One tag, or one piece of text that is none."""
        if self._call is None:
            return self._between_calls()
        if self._parameter is None:
            return self._in_call(self._call)
        return self._in_value(self._call, self._parameter)

    def abandon(self) -> None:
        """The text has ended without EOS: an open call was cut off and is left out."""
        self._output.note_repair(
            "unclosed_tool_block" if self._call is None else "unfinished_tool_call"
        )

    def _between_calls(self) -> bool:
        scanner = self._scanner
        scanner.take_space()
        if scanner.is_empty:
            return False
        tag = read_tag(scanner.text, scanner.at)
        if tag is None and may_become_tag(scanner.text, scanner.at):
            if scanner.final:
                self._output.note_repair("half_marker")
                scanner.advance_to(len(scanner.text))
            return False
        if tag is None or tag.name == "eos":
            self._output.note_repair("unclosed_tool_block")
            self.finished = True
            return True
        self._use(tag)
        if tag.name == "invoke" and not tag.closing:
            self._call = _OpenCall(tag.attribute("name") or None, self._output, self._declared)
        elif tag.name == "tool_calls" and tag.closing:
            self.finished = True
        else:
            self._output.note_repair("stray_dsml_tag")
        return True

    def _in_call(self, call: "_OpenCall") -> bool:
        tag = self._next_tag(Marker.MISSING)
        call.arguments.add_loose_text(
            self._scanner.take_until(tag.start if tag else self._scanner.scanned)
        )
        if tag is None:
            return False
        if tag.name == "parameter" and not tag.closing:
            self._use(tag)
            self._parameter = tag
            self._value = []
            self._ending = tag.marker
        elif tag.name == "invoke" and tag.closing:
            self._use(tag)
            self._end_call(call)
        elif tag.name == "parameter" or (tag.name == "tool_calls" and not tag.closing):
            self._use(tag)
            self._output.note_repair("stray_dsml_tag")
        else:
            self._output.note_repair("unclosed_tool_call")
            self._end_call(call)
        return True

    def _in_value(self, call: "_OpenCall", parameter: Tag) -> bool:
        scanner = self._scanner
        tag = self._next_tag(self._ending)
        self._value.append(scanner.take_until(tag.start if tag else scanner.scanned))
        if tag is None:
            return False
        if tag.name == "tool_calls" and not tag.closing:
            self._value.append(scanner.take_until(tag.end))
            return True
        value = "".join(self._value)
        if tag.name == "parameter" and tag.closing:
            self._use(tag)
        elif (ending := self._damaged_ending(value, tag)) > self._ending:
            # The value never ended as it should have: then it ended with the first damaged tag.
            self._ending = ending
            self._value = []
            scanner.push_back(value)
            return True
        else:
            self._output.note_repair("unclosed_parameter")
            value = value.removesuffix("\n")
            if value.rstrip().endswith(_UNMARKED_CLOSE):
                value = value.rstrip().removesuffix(_UNMARKED_CLOSE)
        self._parameter = None
        name = parameter.attribute("name")
        if name is None:
            self._output.note_repair("parameter_without_name")
        else:
            call.add_parameter(name, value, parameter.attribute("string"))
        return True

    def _damaged_ending(self, value: str, tag: Tag) -> Marker:
        """The marker of tags one of which may have ended a value that reaches up to `tag`."""
        if tag.name == "eos" and _UNMARKED_CLOSE in value:
            return Marker.MISSING
        is_damaged = find_tag_start(value, 0, Marker.ASCII_BARS) is not None
        return Marker.ASCII_BARS if is_damaged else Marker.PRESCRIBED

    def _next_tag(self, marker: Marker) -> Tag | None:
        """The nearest whole tag with this marker, or one before it, or EOS. None while there is
        none: then the text up to `scanned` holds none for sure.
        """
        scanner = self._scanner
        while True:
            start = find_tag_start(scanner.text, scanner.scanned, marker)
            if start is None:
                scanner.scanned = max(scanner.scanned, len(scanner.text) - MAX_START_CHARACTERS)
                return None
            tag = read_tag(scanner.text, start)
            if tag is not None:
                return tag
            scanner.scanned = start
            if may_become_tag(scanner.text, start):
                return None
            scanner.scanned += 1

    def _end_call(self, call: "_OpenCall") -> None:
        call.end()
        self._call = None
        self.whole_until = self._scanner.position

    def _use(self, tag: Tag) -> None:
        self._scanner.advance_to(tag.end)
        if tag.repair is not None:
            self._output.note_repair(tag.repair)


class _OpenCall:
    """A call whose end has not come; one without a name is read and left out."""

    def __init__(
        self,
        name: str | None,
        output: CompletionBuilder,
        declared: Mapping[str, Mapping[str, object]],
    ) -> None:
        self.arguments = ToolCallBuilder(declared.get(name or "", {}), output.note_repair)
        self._output = output
        self._name = name
        self._index = -1 if name is None else output.start_call(name)
        if name is None:
            output.note_repair("tool_call_without_name")

    def add_parameter(self, name: str, value: str, string_attribute: str | None) -> None:
        text = self.arguments.add(name, value, string_attribute)
        if self._name is not None:
            self._output.add_arguments(self._index, text)

    def end(self) -> None:
        rest, arguments = self.arguments.close()
        if self._name is not None:
            self._output.add_arguments(self._index, rest)
            self._output.end_call(self._index, self._name, arguments)
