"""Strings only: DeepSeek-V4 prompts and completions, and the tokenizer. Needs neither torch nor
`dsv4`.

Its modules import one another relatively: the package is also loaded as `dsv4.encoding`, the name
that the folder `encoding/` of a checkpoint in the current directory cannot take.
"""

from .chat_file import load_messages, messages_of_json, messages_of_request
from .completion import (
    Completion,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from .control_tokens import EOS, THINK_OPEN, neutralize
from .deepseek_v4_encoding import encode_messages, parse_message_from_completion_text
from .json_text import parse_json
from .messages import content_text
from .reasoning_effort import detect_profile, fold_reasoning_effort
from .render import tool_calls_opening
from .stop_strings import StopStrings
from .streaming_parser import StreamingParser
from .tokenizer import IncrementalDecoder, Tokenizer
from .tolerant_parser import parse_completion

__all__ = [
    "EOS",
    "THINK_OPEN",
    "Completion",
    "ContentDelta",
    "Event",
    "IncrementalDecoder",
    "ReasoningDelta",
    "StopStrings",
    "StreamingParser",
    "Tokenizer",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "content_text",
    "detect_profile",
    "encode_messages",
    "fold_reasoning_effort",
    "load_messages",
    "messages_of_json",
    "messages_of_request",
    "neutralize",
    "parse_completion",
    "parse_json",
    "parse_message_from_completion_text",
    "tool_calls_opening",
]
