"""The chat of ``--interactive``: from the flags to the last line."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dsv4.cli.arguments import engine_config
from dsv4.cli.chat.chat import Chat
from dsv4.cli.chat.commands import is_command, message_of, run_command
from dsv4.cli.chat.entries import BrokenLine, ReadLine, line_reader, read_entry
from dsv4.cli.conversation import Conversation
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.cli.faults import device_faults
from dsv4.cli.generation_defaults import sampling_params
from dsv4.cli.job import ModelFiles, context_tokens
from dsv4.cli.load import load_engine, say_plan
from dsv4.cli.prompt import Prompt, PromptTooLong, build_prompt, opening
from dsv4.cli.state import check_saved
from dsv4.cli.stream import CONTROL_CHARACTERS
from dsv4.command.errors import user_message
from dsv4.command.program import EXIT_OK
from dsv4.command.streams import say
from dsv4.engine import Engine
from dsv4.errors import UserError


def chat(arguments: argparse.Namespace) -> int:
    """Answers what is typed until there is no more; returns the exit code. Raises ``UserError`` for
    what can be known before the weights are read.
    """
    read_line = line_reader()
    files = ModelFiles.read(arguments.model)
    sampling_params(arguments, files.generation)
    before = None
    if arguments.load_state is not None:
        before = Conversation.read(arguments.load_state, files.config.vocab_size)
    begun, first = beginning(arguments, files, before)
    known = max(
        0 if before is None else before.saved.position,
        0 if first is None else len(first.token_ids),
    )
    context = context_tokens(arguments, files.config, known + arguments.max_tokens)
    config = replace(engine_config(arguments), max_context=context)
    if before is not None:
        check_saved(before.saved, arguments.model, files.config, config)
    plan = partial(Engine.plan, arguments.model, config)
    say_plan(arguments, plan)
    limit_cpu_threads(files.config)
    with device_faults(plan):
        session = Chat(arguments, files, load_engine(arguments, config), [])
        if before is not None:
            session.load(before.saved.path)
        session.messages = begun
        if not arguments.quiet and sys.stdin.isatty():
            say("/help shows the commands of the chat, Ctrl-D ends it")
        if first is not None and first.messages is not None:
            turn(partial(session.ask, first.messages[len(begun) :]))
        converse(session, read_line)
    return EXIT_OK


def beginning(
    arguments: argparse.Namespace, files: ModelFiles, before: Conversation | None
) -> tuple[list[dict], Prompt | None]:
    """The messages before anything is typed, and the prompt that they make with the question of the
    flags, where there is one. Raises ``UserError``.
    """
    prompts = (arguments.prompt, arguments.prompt_file, arguments.messages)
    if any(prompt is not None for prompt in prompts):
        first = build_prompt(arguments, files.tokenizer, files.config, before)
        assert first.messages is not None
        return first.messages[:-1], first
    return opening(arguments) if before is None else before.chat_messages(), None


def converse(session: Chat, read_line: ReadLine) -> None:
    """Takes entries up to the last one. Raises ``UserError`` for stdin that cannot be read on."""
    goes_on = True
    while goes_on:
        calls = session.open_calls
        tool = calls[0]["function"]["name"].translate(CONTROL_CHARACTERS) if calls else ""
        try:
            entry = read_entry(read_line, tool)
        except EOFError:
            return
        except BrokenLine as error:
            say(f"error: {user_message(error)}")
            continue
        if is_command(entry):
            goes_on = turn(partial(run_command, session, entry)) is not False
        else:
            turn(partial(session.tell, message_of(entry)))


def turn(work: Callable[[], bool | None]) -> bool | None:
    """What ``work`` returns; an error of it is one line on stderr, and None. A reader of the text
    who has gone ends the chat.
    """
    try:
        return work()
    except PromptTooLong as error:
        say(f"error: {user_message(error)}; /reset begins a new conversation")
    except BrokenPipeError:
        raise
    except (UserError, FloatingPointError, OSError) as error:
        say(f"error: {user_message(error)}")
    return None
