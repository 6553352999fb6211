"""Flags to token ids: messages, chat encoding or plain text, tokenizer."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsv4.cli.flags import DEFAULT_PROMPT
from dsv4.cli.stream import text_of
from dsv4.cli.token_id_file import read_token_ids
from dsv4.config import ModelConfig
from dsv4.encoding import (
    Tokenizer,
    detect_profile,
    encode_messages,
    fold_reasoning_effort,
    load_messages,
)
from dsv4.errors import UserError
from dsv4.model_files import model_file


@dataclass(frozen=True)
class Prompt:
    """The model's input.

    ``thinking_mode`` is the encoder's ("chat" or "thinking"), ``None`` for plain text. ``tools``
    are those of the conversation, in the OpenAI format.
    """

    text: str
    token_ids: list[int]
    thinking_mode: str | None
    tools: list[dict]


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
    arguments: argparse.Namespace, tokenizer: Tokenizer, config: ModelConfig
) -> Prompt:
    """Encodes what the flags ask for. Raises ``UserError`` naming the flag or file.

    Token ids are taken as they are. Plain text (``--raw``) gets the beginning-of-sequence token in
    front unless it begins with it.
    """
    if arguments.token_ids is not None:
        token_ids = read_token_ids(arguments.token_ids, config.vocab_size)
        return Prompt(text_of(tokenizer, token_ids), token_ids, None, [])
    if not arguments.raw:
        return build_chat_prompt(arguments, tokenizer, most_tokens(arguments, config))
    text = prompt_text(arguments)
    token_ids = encode_text(tokenizer, text, most_tokens(arguments, config))
    if token_ids[:1] != [tokenizer.bos_id]:
        token_ids.insert(0, tokenizer.bos_id)
    return Prompt(text, token_ids, None, [])


def most_tokens(arguments: argparse.Namespace, config: ModelConfig) -> int:
    """What a prompt can have at most."""
    return arguments.max_context or config.max_position_embeddings


def build_chat_prompt(arguments: argparse.Namespace, tokenizer: Tokenizer, most: int) -> Prompt:
    """The messages file, or a user message and an optional system message, in the chat encoding."""
    if arguments.messages is not None:
        source = f"--messages: {arguments.messages}: "
        with user_errors("--messages: "):
            messages = load_messages(arguments.messages)
    else:
        source = "prompt: "
        messages: list[dict] = [{"role": "user", "content": prompt_text(arguments)}]
        if arguments.system is not None:
            messages.insert(0, {"role": "system", "content": arguments.system})
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
    tools = [tool for message in messages for tool in message.get("tools") or []]
    return Prompt(text, encode_text(tokenizer, text, most), mode, tools)


def encode_text(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    """Token ids of the prompt. Raises ``UserError`` for text that is not Unicode, as broken
    arguments are, and without encoding it for text that must have more than ``most`` tokens.
    """
    fewest = tokenizer.fewest_tokens(text)
    if fewest > most:
        raise UserError(
            f"--max-context: found a prompt of at least {fewest} tokens, expected at most {most}"
        )
    with user_errors("prompt: "):
        return tokenizer.encode(text)


def prompt_text(arguments: argparse.Namespace) -> str:
    """The text of ``--prompt`` or ``--prompt-file``, else the default prompt."""
    if arguments.prompt_file is None:
        return DEFAULT_PROMPT if arguments.prompt is None else arguments.prompt
    with user_errors(f"--prompt-file: {arguments.prompt_file}: cannot be read: "):
        if arguments.prompt_file == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(arguments.prompt_file).read_bytes().decode("utf-8")


@contextmanager
def user_errors(prefix: str = "") -> Iterator[None]:
    """Turns ``ValueError`` and ``OSError`` into a ``UserError`` that begins with ``prefix``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{prefix}{error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from None
