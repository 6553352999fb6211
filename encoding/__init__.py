"""Strings only: DeepSeek-V4 prompts and completions, and the tokenizer. Needs neither torch nor
`dsv4`.
"""

from encoding.chat_file import load_messages, messages_of_request
from encoding.completion import (
    Completion,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from encoding.control_tokens import neutralize
from encoding.deepseek_v4_encoding import encode_messages, parse_message_from_completion_text
from encoding.reasoning_effort import detect_profile, fold_reasoning_effort
from encoding.streaming_parser import StreamingParser
from encoding.tokenizer import IncrementalDecoder, Tokenizer
from encoding.tolerant_parser import parse_completion

__all__ = [
    "Completion",
    "ContentDelta",
    "Event",
    "IncrementalDecoder",
    "ReasoningDelta",
    "StreamingParser",
    "Tokenizer",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "detect_profile",
    "encode_messages",
    "fold_reasoning_effort",
    "load_messages",
    "messages_of_request",
    "neutralize",
    "parse_completion",
    "parse_message_from_completion_text",
]
