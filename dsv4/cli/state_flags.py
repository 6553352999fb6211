"""The flags ``--load-state`` and ``--save-state``, and what cannot stand beside the first."""

import argparse

from dsv4.command.flags import path
from dsv4.errors import UserError


def add_load_state_flag(group: argparse._ArgumentGroup) -> None:
    """``--load-state``, among the flags of the prompt."""
    group.add_argument(
        "--load-state",
        type=path,
        metavar="FILE",
        help="go on with the conversation that --save-state wrote: the prompt comes behind it "
        "(default: a new one)",
    )


def add_save_state_flag(group: argparse._ArgumentGroup) -> None:
    """``--save-state``, among those of the output."""
    group.add_argument(
        "--save-state",
        type=path,
        metavar="FILE",
        help="what the caches hold behind prompt and answer, for --load-state (default: none)",
    )


def check_continuation(arguments: argparse.Namespace) -> None:
    """Raises ``UserError`` unless the flags of the prompt can go on with a saved conversation."""
    prompts = (arguments.prompt, arguments.prompt_file, arguments.messages, arguments.token_ids)
    if all(prompt is None for prompt in prompts) and not arguments.interactive:
        raise UserError("--load-state: found without a prompt, expected --prompt or another one")
    for flag, value in (("--system", arguments.system), ("--tools", arguments.tools)):
        if value is not None:
            raise UserError(
                f"{flag}: found together with --load-state, whose conversation has begun already"
            )
    if arguments.trace is not None:
        raise UserError(
            "--trace: found together with --load-state, whose tokens are not computed again"
        )
