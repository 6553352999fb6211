"""The driver's job, decided before any weight is read, and its outcome so far."""

import argparse
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsv4.cli.arguments import engine_config
from dsv4.cli.conversation import Conversation
from dsv4.cli.generation_defaults import eos_token_ids, read_generation_config, sampling_params
from dsv4.cli.prompt import Prompt, PromptTooLong, build_prompt, load_tokenizer
from dsv4.config import ModelConfig
from dsv4.encoding import Tokenizer
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.json_object import JsonReader
from dsv4.limits import MAX_DRAFTS
from dsv4.measure.graph_profile import GraphProfile
from dsv4.measure.op_profile import OpProfile
from dsv4.plan import DEFAULT_MAX_CONTEXT
from dsv4.run_stats import RunStats
from dsv4.sampling import SamplingParams

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Job:
    """Everything that is decided before the weights are read."""

    arguments: argparse.Namespace
    model_config: ModelConfig
    engine_config: EngineConfig
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer
    prompt: Prompt
    before: Conversation | None


@dataclass
class Outcome:
    """The outcome so far; complete enough to report at any moment."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "interrupted"
    stop_string: str | None = None
    load_seconds: float = 0.0
    engine: Engine | None = None
    profile: OpProfile | GraphProfile | None = None
    # Raised when everything else has been reported.
    error: Exception | None = None

    @property
    def stats(self) -> RunStats | None:
        """Those of the engine's last run, if there was one."""
        return None if self.engine is None else self.engine.last_run

    @property
    def complete(self) -> bool:
        """Whether the model ended by itself: nothing is cut off."""
        return self.finish_reason == "stop" and self.stop_string is None


def check_model_folder(folder: Path) -> None:
    """Raises ``UserError`` without such a folder; for what may be a name of the Hugging Face hub
    with the command that fetches it.
    """
    if folder.is_dir():
        return
    advice = ""
    if _HUB_NAME.fullmatch(str(folder)):
        advice = (
            f"; to fetch it from the Hugging Face hub: hf download {folder} "
            f"--local-dir {folder.name}, then --model {folder.name}"
        )
    raise UserError(f"--model: {folder}: no such folder{advice}")


@dataclass(frozen=True)
class ModelFiles:
    """What the small files of a model's folder say; ``generation``: generation_config.json."""

    config: ModelConfig
    tokenizer: Tokenizer
    generation: JsonReader

    @classmethod
    def read(cls, folder: Path) -> "ModelFiles":
        """Reads them. Raises ``UserError``."""
        check_model_folder(folder)
        config = ModelConfig.from_folder(folder)
        return cls(config, load_tokenizer(folder, config), read_generation_config(folder))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What ends an answer: what generation_config.json or config.json says, else the
        tokenizer's end of sequence.
        """
        stated = eos_token_ids(self.config, self.generation)
        return stated or frozenset((self.tokenizer.eos_id,))


def prepare(arguments: argparse.Namespace) -> Job:
    """Reads the small files and checks everything that can be checked without the weights. Raises
    ``UserError``.

    Without ``--max-context`` the caches hold the prompt, the answer and drafts behind it, and what
    is loaded, and at least the engine's default.
    """
    files = ModelFiles.read(arguments.model)
    before = None
    if arguments.load_state is not None:
        before = Conversation.read(arguments.load_state, files.config.vocab_size)
    prompt = build_prompt(arguments, files.tokenizer, files.config, before)
    loaded = 0 if before is None else before.saved.position
    wanted = max(len(prompt.token_ids) + arguments.max_tokens, loaded)
    context = context_tokens(arguments, files.config, wanted)
    return make_job(arguments, files, prompt, context, before)


def context_tokens(arguments: argparse.Namespace, config: ModelConfig, wanted: int) -> int:
    """Tokens that the caches hold: ``--max-context``, else the ``wanted`` ones and at least the
    engine's default. With room for drafts at the end of a run: a seed's text goes with how many are
    made, and must not go with the length of the caches.
    """
    most = config.max_position_embeddings
    return arguments.max_context or min(max(DEFAULT_MAX_CONTEXT, wanted + MAX_DRAFTS), most)


def make_job(
    arguments: argparse.Namespace,
    files: ModelFiles,
    prompt: Prompt,
    context: int,
    before: Conversation | None = None,
) -> Job:
    """The job of a prompt, behind a conversation ``before`` it, in caches of ``context`` tokens.
    Raises ``UserError``, for a prompt that does not fit ``PromptTooLong``.
    """
    if len(prompt.token_ids) > context:
        raise PromptTooLong(
            f"--max-context: found a prompt of {len(prompt.token_ids)} tokens, "
            f"expected at most {context}"
        )
    return Job(
        arguments,
        files.config,
        replace(engine_config(arguments), max_context=context),
        sampling_params(arguments, files.generation),
        files.eos_token_ids,
        files.tokenizer,
        prompt,
        before,
    )
