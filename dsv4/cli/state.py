"""``--load-state`` and ``--save-state``: the checks before the weights are read, and both files."""

from dsv4.checkpoint import open_checkpoint
from dsv4.checkpoint.identity import checkpoint_identity
from dsv4.checkpoint.state_file import StateKey
from dsv4.cli.conversation import conversation_notes
from dsv4.cli.job import Job, Outcome
from dsv4.cli.report import answer_of
from dsv4.command.streams import say
from dsv4.engine import Engine
from dsv4.errors import UserError


def check_state(job: Job) -> None:
    """Raises ``UserError`` for a state that the engine will not take, before it is loaded."""
    if job.before is None:
        return
    identity = checkpoint_identity(open_checkpoint(job.arguments.model))
    key = StateKey.of(job.model_config, job.engine_config, identity)
    assert job.engine_config.max_context is not None
    job.before.saved.check(key, job.engine_config.max_context)


def load_state(job: Job, engine: Engine) -> int:
    """Puts the state of ``--load-state`` into the engine; how many tokens of the prompt it holds.
    One line on stderr says so when there are none.
    """
    if job.before is None:
        return 0
    engine.load_state(job.before.saved.path)
    reused = engine.reusable_tokens(job.prompt.token_ids)
    if not reused and not job.arguments.quiet:
        say(
            f"--load-state: {job.before.saved.path}: earlier turns read otherwise in this prompt, "
            "so all of it is prefilled"
        )
    return reused


def save_state(job: Job, outcome: Outcome, engine: Engine) -> None:
    """Writes the file of ``--save-state``, behind the answer. An error enters ``outcome``."""
    prompt = job.prompt
    _, answer = answer_of(job, outcome)
    token_ids = prompt.token_ids + outcome.token_ids
    notes = conversation_notes(prompt.messages, answer.message, token_ids, engine.position)
    try:
        engine.save_state(job.arguments.save_state, notes)
    except UserError as error:
        outcome.save_error = error
