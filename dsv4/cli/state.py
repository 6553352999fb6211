"""``--load-state`` and ``--save-state``: the checks before the weights are read, and both files."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dsv4.checkpoint import open_checkpoint
from dsv4.checkpoint.identity import checkpoint_identity
from dsv4.checkpoint.state_file import SavedState, StateKey
from dsv4.cli.conversation import answered, conversation_notes
from dsv4.cli.job import Job, Outcome
from dsv4.cli.prompt import encode_conversation
from dsv4.cli.report import answer_of
from dsv4.command.streams import say
from dsv4.config import ModelConfig
from dsv4.encoding import Tokenizer
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError


def check_state(job: Job) -> None:
    """Raises ``UserError`` for a state that the engine will not take, before it is loaded."""
    if job.before is not None:
        check_saved(job.before.saved, job.arguments.model, job.model_config, job.engine_config)


def check_saved(saved: SavedState, folder: Path, config: ModelConfig, engine: EngineConfig) -> None:
    """Raises ``UserError`` for a state that is not of this checkpoint, caches and context."""
    identity = checkpoint_identity(open_checkpoint(folder))
    assert engine.max_context is not None
    saved.check(StateKey.of(config, engine, identity), engine.max_context)


def load_state(job: Job, engine: Engine) -> int:
    """Puts the state of ``--load-state`` into the engine; how many tokens of the prompt it holds.
    One line on stderr says so when it has tokens and none are of the prompt.
    """
    if job.before is None:
        return 0
    engine.load_state(job.before.saved.path)
    reused = engine.reusable_tokens(job.prompt.token_ids)
    if not reused and engine.position and not job.arguments.quiet:
        say(
            f"--load-state: {job.before.saved.path}: earlier turns read otherwise in this prompt, "
            "so all of it is prefilled"
        )
    return reused


def save_state(job: Job, outcome: Outcome, engine: Engine) -> None:
    """Writes the file of ``--save-state``, behind the answer. An error enters ``outcome``."""
    prompt = job.prompt
    messages = prompt.messages
    if messages is not None:
        messages = answered(messages, answer_of(job, outcome)[1].message)
    token_ids = prompt.token_ids + outcome.token_ids
    path = job.arguments.save_state
    try:
        write_state(job.arguments, job.tokenizer, engine, messages, token_ids, path)
    except UserError as error:
        outcome.error = error


def write_state(
    arguments: argparse.Namespace,
    tokenizer: Tokenizer,
    engine: Engine,
    messages: list[dict] | None,
    token_ids: Sequence[int],
    path: Path,
) -> None:
    """Writes a state file of the conversation ``messages``, None for plain text, whose tokens are
    ``token_ids``; the engine's sequence begins them. Raises ``UserError``.

    The engine goes back to what the next prompt will have in common with its sequence: what is
    behind cannot be taken back in another process.
    """
    shared = (
        0 if messages is None else engine.reusable_tokens(next_turn(arguments, tokenizer, messages))
    )
    if shared:
        engine.rewind_to(shared)
    engine.save_state(path, conversation_notes(messages, token_ids, engine.position))


def next_turn(
    arguments: argparse.Namespace, tokenizer: Tokenizer, messages: list[dict]
) -> list[int]:
    """The tokens of a prompt that goes on with ``messages``; none for what cannot be encoded, which
    the next prompt reports.
    """
    turn = [*messages, {"role": "user", "content": ""}]
    try:
        return encode_conversation(arguments, tokenizer, sys.maxsize, turn).token_ids
    except UserError:
        return []
