"""Sampling and stop tokens: the flags, else generation_config.json, else the defaults
(model.md#sampling).
"""

import argparse
import secrets
from pathlib import Path
from typing import Any

from dsv4.config import ModelConfig
from dsv4.errors import UserError, shorten
from dsv4.json_object import read_json_object
from dsv4.model_files import model_file
from dsv4.sampling import SamplingParams

FILE_NAME = "generation_config.json"
# Readers of JSON that know only doubles keep such an integer.
_SEED_BITS = 53


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's generation_config.json, empty if there is none. Raises ``UserError`` for a
    damaged file.
    """
    path = model_file(folder, FILE_NAME)
    return read_json_object(path) if path.exists() else {}


def sampling_params(arguments: argparse.Namespace, defaults: dict[str, Any]) -> SamplingParams:
    """Each value from its flag, else from ``defaults``; ``do_sample: false`` is greedy.

    Without ``--seed`` one is drawn here, so that the report can hold it. Raises ``UserError``.
    """
    greedy = decodes_greedily(defaults)
    params = SamplingParams(
        temperature=choose(
            arguments.temperature,
            0.0 if greedy else defaults.get("temperature"),
            1.0,
            "temperature",
        ),
        top_p=choose(arguments.top_p, defaults.get("top_p"), 1.0, "top_p"),
        min_p=choose(arguments.min_p, defaults.get("min_p"), 0.0, "min_p"),
        seed=secrets.randbits(_SEED_BITS) if arguments.seed is None else arguments.seed,
        logprobs=arguments.logprobs,
        top_k=top_k(arguments.top_k, defaults.get("top_k")),
    )
    refuse_what_has_no_effect(arguments, params)
    return params


def check_defaults(config: ModelConfig, defaults: dict[str, Any]) -> None:
    """Raises ``UserError`` that names generation_config.json for the first of its values that
    cannot be used.
    """
    decodes_greedily(defaults)
    for key in ("temperature", "top_p", "min_p", "top_k"):
        if defaults.get(key) is not None:
            _check(key, defaults[key])
    eos_token_ids(config, defaults)


def decodes_greedily(defaults: dict[str, Any]) -> bool:
    """Whether the file asks for greedy decoding. Raises ``UserError`` for a ``do_sample`` that is
    neither true nor false.
    """
    found = defaults.get("do_sample")
    if found is not None and not isinstance(found, bool):
        raise UserError(f"{FILE_NAME}: do_sample: found {shorten(found)}, expected true or false")
    return found is False


def refuse_what_has_no_effect(arguments: argparse.Namespace, params: SamplingParams) -> None:
    """Raises ``UserError`` for a flag that only sampling uses, where nothing is sampled."""
    chosen_by = FILE_NAME if arguments.temperature is None else "--temperature"
    for name in ("top_k", "top_p", "min_p", "seed"):
        if params.temperature == 0 and vars(arguments)[name] is not None:
            raise UserError(
                f"--{name.replace('_', '-')}: found with greedy decoding (by {chosen_by}), "
                "expected --temperature above 0"
            )


def choose(flag: float | None, default: object, fallback: float, key: str) -> float:
    """The flag's value, else the file's, else ``fallback``. Raises ``UserError`` that names the
    file for a value that ``SamplingParams`` refuses.
    """
    if flag is not None:
        return flag
    if default is None:
        return fallback
    return float(_check(key, default))


def top_k(flag: int | None, default: object) -> int:
    """The flag's value, else the file's, else 0. Raises ``UserError`` as ``choose`` does."""
    if flag is not None:
        return flag
    if default is None:
        return 0
    return int(_check("top_k", default))


def _check(key: str, default: Any) -> Any:
    """The file's value of a field of ``SamplingParams``."""
    try:
        SamplingParams(**{key: default})
    except UserError as error:
        raise UserError(f"{FILE_NAME}: {error}") from None
    return default


def eos_token_ids(config: ModelConfig, defaults: dict[str, Any]) -> frozenset[int]:
    """The end-of-sequence ids of generation_config.json, else those of config.json. Raises
    ``UserError`` for what is no token id of the model.
    """
    found = defaults.get("eos_token_id")
    if found is None:
        ids = config.eos_token_ids
    else:
        ids = found if isinstance(found, list | tuple) else [found]
    # A bool is an int too.
    if not all(type(token_id) is int and 0 <= token_id < config.vocab_size for token_id in ids):
        raise UserError(
            f"{FILE_NAME}: eos_token_id: found {shorten(found)}, "
            f"expected token ids below {config.vocab_size}"
        )
    return frozenset(ids)
