"""The driver's job, decided before any weight is read, and its outcome so far."""

import argparse
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsv4.cli.arguments import engine_config
from dsv4.cli.generation_defaults import eos_token_ids, read_generation_config, sampling_params
from dsv4.cli.prompt import Prompt, build_prompt, load_tokenizer
from dsv4.config import ModelConfig
from dsv4.encoding import Tokenizer
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.measure.graph_profile import GraphProfile
from dsv4.measure.op_profile import OpProfile
from dsv4.plan import DEFAULT_MAX_CONTEXT
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


@dataclass
class Outcome:
    """The outcome so far; complete enough to report at any moment."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "interrupted"
    stop_string: str | None = None
    load_seconds: float = 0.0
    engine: Engine | None = None
    profile: OpProfile | GraphProfile | None = None

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


def prepare(arguments: argparse.Namespace) -> Job:
    """Reads the small files and checks everything that can be checked without the weights. Raises
    ``UserError``.

    Without ``--max-context`` the caches hold the prompt and the answer, and at least the engine's
    default.
    """
    check_model_folder(arguments.model)
    model_config = ModelConfig.from_folder(arguments.model)
    tokenizer = load_tokenizer(arguments.model, model_config)
    prompt = build_prompt(arguments, tokenizer, model_config)
    wanted = max(DEFAULT_MAX_CONTEXT, len(prompt.token_ids) + arguments.max_tokens)
    context = arguments.max_context or min(wanted, model_config.max_position_embeddings)
    if len(prompt.token_ids) > context:
        raise UserError(
            f"--max-context: found a prompt of {len(prompt.token_ids)} tokens, "
            f"expected at most {context}"
        )
    defaults = read_generation_config(arguments.model)
    return Job(
        arguments,
        model_config,
        replace(engine_config(arguments), max_context=context),
        sampling_params(arguments, defaults),
        eos_token_ids(model_config, defaults),
        tokenizer,
        prompt,
    )
