"""Collects what a completion holds, as events and as the final message."""

from .completion import (
    Completion,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


class CompletionBuilder:
    """The output side of the streaming parser."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._tool_calls: list[dict] = []
        self._started_calls = 0
        self._repairs: dict[str, None] = {}
        self._cut_off = ""

    def note_repair(self, name: str) -> None:
        """Remembers that something was mended, once per name."""
        self._repairs.setdefault(name)

    def add_text(self, text: str, in_reasoning: bool) -> None:
        """More reasoning or content."""
        if in_reasoning:
            self._reasoning.append(text)
            self._events.append(ReasoningDelta(text))
        else:
            self._content.append(text)
            self._events.append(ContentDelta(text))

    def has_text(self, in_reasoning: bool) -> bool:
        """Whether there is any reasoning, or any content."""
        return bool(self._reasoning if in_reasoning else self._content)

    def is_blank(self) -> bool:
        """Whether nothing but white space was said and no call begun."""
        return self._started_calls == 0 and not any(
            part.strip() for part in (*self._reasoning, *self._content)
        )

    def start_call(self, name: str) -> int:
        """Begins a call and returns its index."""
        self._events.append(ToolCallStart(self._started_calls, name))
        self._started_calls += 1
        return self._started_calls - 1

    def add_arguments(self, index: int, text: str) -> None:
        """More JSON text of a call's arguments."""
        if text:
            self._events.append(ToolCallArguments(index, text))

    def end_call(self, index: int, name: str, arguments: str) -> None:
        """A call is whole."""
        self._events.append(ToolCallEnd(index, name, arguments))
        self._tool_calls.append(
            {"type": "function", "function": {"name": name, "arguments": arguments}}
        )

    def leave_out(self, text: str) -> None:
        """The end of the text is the beginning of something that never came to its end."""
        self._cut_off = text.strip()

    def take_events(self) -> list[Event]:
        """The events since the last time."""
        events = self._events
        self._events = []
        return events

    def completion(self, complete: bool) -> Completion:
        """Everything so far as one message."""
        message = {
            "role": "assistant",
            "content": "".join(self._content),
            "reasoning_content": "".join(self._reasoning),
            "tool_calls": list(self._tool_calls),
        }
        return Completion(message, tuple(self._repairs), complete, self._cut_off)
