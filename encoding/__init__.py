"""Strings only: DeepSeek-V4 prompts and completions, and the tokenizer. Needs neither torch nor `dsv4`."""

from encoding.chat_file import load_messages, messages_of_request
from encoding.deepseek_v4_encoding import encode_messages, parse_message_from_completion_text
from encoding.reasoning_effort import detect_profile, fold_reasoning_effort
from encoding.tokenizer import IncrementalDecoder, Tokenizer

__all__ = [
    "IncrementalDecoder",
    "Tokenizer",
    "detect_profile",
    "encode_messages",
    "fold_reasoning_effort",
    "load_messages",
    "messages_of_request",
    "parse_message_from_completion_text",
]
