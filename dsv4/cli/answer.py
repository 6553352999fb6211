"""One answer: tokens of the engine to text, up to what ends it."""

from collections.abc import Generator
from contextlib import closing

from dsv4.cli.job import Job, Outcome
from dsv4.cli.stream import TokenText
from dsv4.engine import Engine
from dsv4.layers.values import Watch
from dsv4.progress import Progress


def answer(
    job: Job,
    engine: Engine,
    outcome: Outcome,
    text: TokenText,
    prefilling: Progress | None = None,
    watch: Watch | None = None,
    reuse: bool = False,
) -> Generator[str, None, None]:
    """Yields for every token the characters that it completes in ``text``, then what was held back;
    ``outcome`` is filled as it goes. ``reuse``: the engine's sequence begins the prompt. Raises
    what ``Engine.generate`` does.
    """
    arguments = job.arguments
    stops = frozenset() if arguments.ignore_eos else job.eos_token_ids
    tokens = engine.generate(
        job.prompt.token_ids,
        arguments.max_tokens,
        job.sampling,
        stops,
        prefilling,
        watch,
        reuse=reuse,
    )
    with closing(tokens):
        for token in tokens:
            outcome.token_ids.append(token)
            shown = "" if token in job.eos_token_ids else text.push(token)
            outcome.stop_string = text.stop_string
            yield shown
            if text.stop_string is not None:
                break
    assert engine.last_run is not None
    # An unfinished character may be the stop string U+FFFD.
    rest = text.finish()
    outcome.stop_string = text.stop_string
    stopped = outcome.stop_string is not None
    outcome.finish_reason = "stop" if stopped else engine.last_run.finish_reason
    if rest:
        yield rest
