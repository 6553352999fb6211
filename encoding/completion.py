"""The parts of a parsed completion, at once (`Completion`) or piece by piece (`Event`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """A parsed completion.

    message: as `parse_message_from_completion_text` returns it. The arguments of every tool call
        are a valid JSON object; a call that was cut off is left out.
    repairs: names of the deviations that were mended, in the order of their first occurrence; empty
        for a completion that follows the format. `encoding.streaming_parser` lists the names.
    complete: whether the model ended its turn itself (EOS), so that nothing is missing at the end.
    cut_off: what was left out at the end because it was cut off, as the model wrote it: a tool
        call, or half a marker.
    """

    message: dict
    repairs: tuple[str, ...]
    complete: bool
    cut_off: str = ""


@dataclass(frozen=True)
class ReasoningDelta:
    """More reasoning text."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The model begins call number `index`. A call that never gets a `ToolCallEnd` was cut off and
    does not count.
    """

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More JSON text of the arguments of call `index`; all pieces together are the final
    `arguments`.
    """

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """Call `index` is whole; `arguments` is a JSON object as text."""

    index: int
    name: str
    arguments: str


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
