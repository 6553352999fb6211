"""The flags ``--interactive`` and ``--tools``, and what cannot stand beside the first."""

import argparse

from dsv4.errors import UserError


def add_chat_flags(group: argparse._ArgumentGroup) -> None:
    """``--interactive`` and ``--tools``, among the flags of the prompt."""
    group.add_argument(
        "--interactive",
        action="store_true",
        help="a chat: prompts are typed, or lines of stdin; with --prompt or --messages it begins "
        "with that (default: one answer)",
    )
    group.add_argument(
        "--tools",
        metavar="FILE",
        help="the tools that the model may call, a JSON list in the OpenAI format; - is stdin "
        "(default: none, or those of --messages)",
    )


def check_chat_flags(arguments: argparse.Namespace) -> None:
    """Raises ``UserError`` for flags that a chat cannot have."""
    if not arguments.interactive:
        return
    of_one_answer = {
        "--prompts": arguments.prompts is not None,
        "--token-ids": arguments.token_ids is not None,
        "--raw": arguments.raw,
        "--json": arguments.json is not None,
        "--logprobs": arguments.logprobs is not None,
        "--save-state": arguments.save_state is not None,
        "--trace": arguments.trace is not None,
        "--trace-at": bool(arguments.trace_at),
        "--profile": arguments.profile,
        "--plan": arguments.plan,
    }
    for flag, given in of_one_answer.items():
        if given:
            advice = "; /save FILE does it in the chat" if flag == "--save-state" else ""
            raise UserError(
                f"{flag}: found together with --interactive, expected a single answer{advice}"
            )
    for flag, file in (
        ("--prompt-file", arguments.prompt_file),
        ("--messages", arguments.messages),
        ("--tools", arguments.tools),
    ):
        if file == "-":
            raise UserError(f"{flag}: found stdin together with --interactive, which reads it")
