"""Completion text → message, for text as models really write it (model.md#parsing)."""

from .completion import Completion
from .streaming_parser import StreamingParser


def parse_completion(text: str, thinking_mode: str, tools: list[dict] | None = None) -> Completion:
    """The message in `text`, what had to be mended, and whether the model had come to its end.

    Never raises for any text. For a completion that follows the format the message equals that of
    `parse_message_from_completion_text` and there are no repairs, unless a line of its text begins
    with a damaged call, a value holds a prescribed tag, a tag has more than 4096 characters, or an
    undeclared parameter is a wrapper.
    The end-of-sentence token must be part of `text`. `tools` is the list that the prompt had; with
    it, declared parameters are never taken for wrappers, nor damaged tags for calls of others.
    """
    parser = StreamingParser(thinking_mode, tools)
    parser.feed(text)
    parser.finish()
    return parser.completion
