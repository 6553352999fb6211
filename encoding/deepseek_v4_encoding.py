"""Messages → DeepSeek-V4 prompt text, and completion text → message (model.md#chat-encoding).

Control tokens that are quoted in somebody's text (system, user, developer, assistant history, tool
results, tool schemas, names and arguments of earlier calls) are neutralised by default: see
`encoding.control_tokens`. Text without such literals is never changed.
"""

from dataclasses import replace

from .control_tokens import BOS, THINK_CLOSE, THINK_OPEN
from .messages import Message, check_thinking_mode, parse_messages
from .preprocess import drop_old_developers, merge_user_turns, sort_tool_results
from .reasoning_effort import effort_prefix
from .render import Piece, join_pieces, render_messages
from .strict_parser import parse_message_from_completion_text

__all__ = ["encode_messages", "parse_message_from_completion_text"]


def encode_messages(
    messages: list[dict],
    thinking_mode: str,
    *,
    context: list[dict] | None = None,
    drop_thinking: bool = True,
    add_default_bos_token: bool = True,
    reasoning_effort: str | None = None,
    profile: str = "preview",
    neutralize_control_tokens: bool = True,
) -> str:
    """The prompt for `messages`, to be tokenised without adding special tokens: it already begins
    with BOS.

    messages: OpenAI-style dictionaries with role system, user, assistant, tool, developer or
        latest_reminder (model.md#messages). `tools` and `response_format` belong to a system or
        developer message. They are read, never changed.
    thinking_mode: "thinking" lets the model reason first, "chat" does not.
    context: earlier messages whose text the caller already has. Only what follows it is returned,
        without BOS.
    drop_thinking: leaves out the reasoning of turns before the last user message. Ignored if any
        message has tools.
    add_default_bos_token: False leaves out BOS.
    reasoning_effort, profile: see `encoding.reasoning_effort`; no effect in chat mode.
    neutralize_control_tokens: False writes all text as it is, like the official encoder. With True
        an assistant's reasoning that still carries its `<think>` tags loses them, since the format
        writes its own.

    The generation prompt is written after a final user, developer or tool message. A conversation
    that ends with an assistant message is closed by EOS, or left open for continuation if that
    message has `wo_eos`. Raises ValueError, with one line, for anything in the arguments that the
    format cannot express.
    """
    check_thinking_mode(thinking_mode)
    thinking = thinking_mode == "thinking"
    prefix = effort_prefix(reasoning_effort, profile)
    earlier = merge_user_turns(parse_messages(context or [], "context"))
    conversation = sort_tool_results(
        earlier + merge_user_turns(parse_messages(messages, "messages"))
    )
    if neutralize_control_tokens:
        conversation = [_without_echoed_think_tags(message) for message in conversation]

    drop_thinking = drop_thinking and not any(message.tools for message in conversation)
    kept: list[Message | None] = [*conversation]
    if thinking and drop_thinking:
        kept = drop_old_developers(conversation)
    context_count = sum(message is not None for message in kept[: len(earlier)])
    remaining = [message for message in kept if message is not None]
    rendered = list(render_messages(remaining, thinking, drop_thinking))
    context_pieces = [piece for pieces in rendered[:context_count] for piece in pieces]
    new_pieces = [piece for pieces in rendered[context_count:] for piece in pieces]
    if thinking and new_pieces and context_count == 0:
        new_pieces.insert(0, Piece(prefix))
    if add_default_bos_token and not earlier:
        new_pieces.insert(0, Piece(BOS))
    context_text = join_pieces(context_pieces, neutralize_control_tokens)
    return join_pieces(context_pieces + new_pieces, neutralize_control_tokens)[len(context_text) :]


def _without_echoed_think_tags(message: Message) -> Message:
    return replace(
        message, reasoning=message.reasoning.removeprefix(THINK_OPEN).removesuffix(THINK_CLOSE)
    )
