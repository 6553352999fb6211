"""Flags to token ids: messages, chat encoding or plain text, tokenizer."""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsv4.cli.conversation import Conversation
from dsv4.cli.flags import DEFAULT_PROMPT
from dsv4.cli.input_file import read_input, read_text
from dsv4.cli.message_fields import check_parts, check_request, check_roles
from dsv4.cli.stream import text_of
from dsv4.cli.tag_names import check_tag_names
from dsv4.cli.token_id_file import read_token_ids
from dsv4.command.errors import user_message
from dsv4.config import ModelConfig
from dsv4.encoding import (
    THINK_OPEN,
    Tokenizer,
    detect_profile,
    encode_messages,
    fold_reasoning_effort,
    messages_of_request,
    parse_json,
)
from dsv4.errors import UserError
from dsv4.model_files import model_file

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Prompt:
    """The model's input.

    ``thinking_mode`` is how the answer is read: "chat" or "thinking", ``None`` for plain text.
    ``tools`` are those of the conversation, in the OpenAI format; ``messages`` the conversation
    itself, None for plain text.
    """

    text: str
    token_ids: list[int]
    thinking_mode: str | None
    tools: list[dict]
    messages: list[dict] | None


class PromptTooLong(UserError):
    """A prompt that the context cannot hold."""


def load_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises ``UserError``, also for ids that the model lacks."""
    file = model_file(folder, "tokenizer.json")
    with user_errors():
        tokenizer = Tokenizer(file)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{file}: found {tokenizer.vocab_size} token ids, "
            f"expected at most {config.vocab_size} (vocab_size of config.json)"
        )
    return tokenizer


def build_prompt(
    arguments: argparse.Namespace,
    tokenizer: Tokenizer,
    config: ModelConfig,
    before: Conversation | None = None,
) -> Prompt:
    """Encodes what the flags ask for, behind the conversation ``before`` where there is one. Raises
    ``UserError`` naming the flag or file.

    Token ids are taken as they are. Plain text (``--raw``) that begins a sequence gets the
    beginning-of-sequence token in front unless it begins with it.
    """
    earlier = [] if before is None else before.token_ids
    most = most_tokens(arguments, config)
    if arguments.token_ids is not None:
        token_ids = earlier + read_token_ids(arguments.token_ids, config.vocab_size)
        return Prompt(text_of(tokenizer, token_ids), token_ids, None, [], None)
    if not arguments.raw:
        messages = [] if before is None else before.chat_messages()
        return build_chat_prompt(arguments, tokenizer, most, messages)
    text = prompt_text(arguments)
    token_ids = earlier + encode_text(tokenizer, text, most)
    if not earlier and token_ids[:1] != [tokenizer.bos_id]:
        token_ids.insert(0, tokenizer.bos_id)
    return Prompt(text_of(tokenizer, earlier) + text, token_ids, None, [], None)


def most_tokens(arguments: argparse.Namespace, config: ModelConfig) -> int:
    """What a prompt can have at most."""
    return arguments.max_context or config.max_position_embeddings


def build_chat_prompt(
    arguments: argparse.Namespace, tokenizer: Tokenizer, most: int, earlier: list[dict]
) -> Prompt:
    """The messages, or a user message and an optional system message, in the chat encoding, behind
    the ``earlier`` messages.
    """
    of_file = isinstance(arguments.messages, str)
    source = f"--messages: {arguments.messages}: " if of_file else "messages: "
    messages = conversation(arguments, source)
    check_unicode(messages, "messages", source)
    check_roles(messages, source)
    check_parts(messages, source)
    for index, message in enumerate(messages):
        for key in ("tools", "tool_calls") if isinstance(message, dict) else ():
            check_tag_names(message.get(key), f"{source}messages[{index}].{key}")
    return encode_conversation(arguments, tokenizer, most, [*earlier, *messages], source)


def encode_conversation(
    arguments: argparse.Namespace,
    tokenizer: Tokenizer,
    most: int,
    messages: list[dict],
    source: str = "messages: ",
) -> Prompt:
    """The chat encoding of ``messages``, whose last one asks for an answer. ``source`` begins their
    errors. Raises ``UserError``, ``PromptTooLong`` beyond ``most`` tokens.
    """
    mode = "thinking" if arguments.thinking == "on" else "chat"
    effort = arguments.reasoning_effort
    with user_errors():
        profile = detect_profile(arguments.model)
    if effort is not None:
        with user_errors("--reasoning-effort: "):
            effort = fold_reasoning_effort(effort, profile)
    with user_errors(source):
        text = encode_messages(
            messages,
            mode,
            reasoning_effort=effort,
            profile=profile,
            neutralize_control_tokens=not arguments.allow_control_tokens,
        )
    token_ids = encode_text(tokenizer, text, most)
    check_last_message(messages, source)
    # What goes on an assistant's message is its answer: reasoning has been closed before it. The
    # answer to a task has none.
    is_open = messages[-1]["role"] != "assistant" and text.endswith(THINK_OPEN)
    shown_mode = "thinking" if is_open else "chat"
    tools = [tool for message in messages for tool in message.get("tools") or []]
    return Prompt(text, token_ids, shown_mode, tools, messages)


def conversation(arguments: argparse.Namespace, source: str) -> list[dict]:
    """The messages of the file ``arguments.messages``, or of the chat request that it is (in a line
    of ``--prompts``), or those that the prompt makes. ``source`` begins errors of the first two.
    """
    if isinstance(arguments.messages, str):
        raw = read_input("--messages", arguments.messages)
        with user_errors(source):
            request = parse_json(raw)
            check_request(request)
            return messages_of_request(request)
    if arguments.messages is not None:
        return messages_of_request(arguments.messages)
    question = {"role": "user", "content": prompt_text(arguments)}
    return [*opening(arguments), question]


def opening(arguments: argparse.Namespace) -> list[dict]:
    """What ``--system`` and ``--tools`` say before the first question. Raises ``UserError``."""
    messages: list[dict] = []
    if arguments.system is not None:
        check_unicode(arguments.system, "--system")
        messages.append({"role": "system", "content": arguments.system})
    return messages if arguments.tools is None else with_tools(messages, arguments.tools)


def with_tools(messages: list[dict], file: str) -> list[dict]:
    """The messages with the tools of a file: a list in the OpenAI format, or a chat request that
    has one. Raises ``UserError`` that names the file.
    """
    raw = read_input("--tools", file)
    with user_errors(f"--tools: {file}: "):
        found = parse_json(raw)
        tools = found.get("tools") if isinstance(found, dict) else found
        if not isinstance(tools, list):
            raise UserError('expected a list of tools or an object with a list "tools"')
        check_unicode(tools, "tools")
        check_tag_names(tools, "tools")
        return messages_of_request({"messages": messages, "tools": tools})


def encode_text(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    """Token ids of the prompt. Raises ``UserError`` for text that is not Unicode, as broken
    arguments are, and ``PromptTooLong`` without encoding it for text that must have more than
    ``most`` tokens.
    """
    fewest = tokenizer.fewest_tokens(text)
    if fewest > most:
        raise PromptTooLong(
            f"--max-context: found a prompt of at least {fewest} tokens, expected at most {most}"
        )
    with user_errors("prompt: "):
        return tokenizer.encode(text)


def check_last_message(messages: list[dict], source: str) -> None:
    """Raises ``UserError`` unless the model is asked to speak: by the last message, by its task
    token, or by an assistant's message that ``wo_eos`` leaves open.
    """
    # Not by their roles: a server reads the developer as the system.
    expected = "expected a question or the result of a tool at the end"
    if not messages:
        raise UserError(f"{source}found no messages, {expected}")
    last = messages[-1]
    role = last["role"]
    asks = role in ("user", "tool", "developer") or last.get("task") is not None
    if not asks and not (role == "assistant" and last.get("wo_eos")):
        advice = '; "wo_eos": true in it lets the model go on with it'
        raise UserError(
            f"{source}found a message of {role} at the end, {expected}"
            f"{advice if role == 'assistant' else ''}"
        )


def prompt_text(arguments: argparse.Namespace) -> str:
    """The text of ``--prompt`` or ``--prompt-file``, else the default prompt. Raises ``UserError``
    when there is none, as behind a pipe that has failed.
    """
    if arguments.prompt_file is None:
        source = "--prompt"
        text = DEFAULT_PROMPT if arguments.prompt is None else arguments.prompt
    else:
        source = f"--prompt-file: {arguments.prompt_file}"
        text = read_text("--prompt-file", arguments.prompt_file)
    if not text:
        raise UserError(f"{source}: found no text, expected a prompt")
    check_unicode(text, source)
    return text


def check_unicode(value: object, where: str, source: str = "") -> None:
    """Raises ``UserError`` that says in which of the strings of ``value`` a lone surrogate stands,
    as broken arguments and JSON escapes have them. ``source`` begins the message.
    """
    waiting = [(value, where)]
    for part, place in waiting:
        if isinstance(part, dict):
            waiting += [(key, f"a key of {place}") for key in part]
            waiting += [(inner, f"{place}.{key}") for key, inner in part.items()]
        elif isinstance(part, list):
            waiting += [(inner, f"{place}[{index}]") for index, inner in enumerate(part)]
        elif isinstance(part, str) and (found := _SURROGATE.search(part)) is not None:
            raise UserError(
                f"{source}{place}: found a lone surrogate at character {found.start()}, "
                "expected valid Unicode"
            )


@contextmanager
def user_errors(prefix: str = "") -> Iterator[None]:
    """Turns ``ValueError`` and ``OSError`` into a ``UserError`` that begins with ``prefix``."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"{prefix}{user_message(error)}") from None
