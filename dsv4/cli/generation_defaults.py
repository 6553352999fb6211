"""Sampling and stop tokens: the flags, else generation_config.json, else the defaults
(model.md#sampling).
"""

import argparse
import secrets
from pathlib import Path
from typing import Any, TypeVar

from dsv4.command.flags import flag_name
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.json_object import JsonReader, read_json_object
from dsv4.model_files import model_file
from dsv4.sampling import SamplingParams

FILE_NAME = "generation_config.json"
# Readers of JSON that know only doubles keep such an integer.
_SEED_BITS = 53
_Number = TypeVar("_Number", int, float)


def read_generation_config(folder: Path) -> JsonReader:
    """The checkpoint's generation_config.json, empty if there is none. Raises ``UserError`` for a
    damaged file.
    """
    path = model_file(folder, FILE_NAME)
    return JsonReader(read_json_object(path) if path.exists() else {}, str(path))


def sampling_params(arguments: argparse.Namespace, defaults: JsonReader) -> SamplingParams:
    """Each value from its flag, else from ``defaults``; ``do_sample: false`` is greedy.

    Without ``--seed`` one is drawn here where it is used, so that the report can hold it. Raises
    ``UserError``.
    """
    chosen = temperature(arguments.temperature, defaults)
    is_drawn = arguments.seed is None and chosen > 0
    params = SamplingParams(
        temperature=chosen,
        top_p=choose(arguments.top_p, defaults, "top_p", 1.0),
        min_p=choose(arguments.min_p, defaults, "min_p", 0.0),
        seed=secrets.randbits(_SEED_BITS) if is_drawn else arguments.seed,
        logprobs=arguments.logprobs,
        top_k=choose(arguments.top_k, defaults, "top_k", 0),
    )
    refuse_what_has_no_effect(arguments, params)
    return params


def check_defaults(config: ModelConfig, defaults: JsonReader) -> None:
    """Raises ``UserError`` that names generation_config.json for the first of its values that
    cannot be used.
    """
    decodes_greedily(defaults)
    for key in ("temperature", "top_p", "min_p", "top_k"):
        if key in defaults.values:
            _check(defaults, key)
    eos_token_ids(config, defaults)


def decodes_greedily(defaults: JsonReader) -> bool:
    """Whether the file asks for greedy decoding. Raises ``UserError`` for a ``do_sample`` that is
    neither true nor false.
    """
    found = defaults.values.get("do_sample")
    if found is not None and not isinstance(found, bool):
        raise defaults.fail("do_sample", found, "true or false")
    return found is False


def refuse_what_has_no_effect(arguments: argparse.Namespace, params: SamplingParams) -> None:
    """Raises ``UserError`` for a flag that only sampling uses, where nothing is sampled."""
    chosen_by = FILE_NAME if arguments.temperature is None else "--temperature"
    for name in ("top_k", "top_p", "min_p", "seed"):
        if params.temperature == 0 and vars(arguments)[name] is not None:
            raise UserError(
                f"{flag_name(name)}: found with greedy decoding (by {chosen_by}), "
                "expected --temperature above 0"
            )


def temperature(flag: float | None, defaults: JsonReader) -> float:
    """As ``choose``; ``do_sample: false`` is 0."""
    greedy = decodes_greedily(defaults)
    return 0.0 if greedy and flag is None else choose(flag, defaults, "temperature", 1.0)


def choose(flag: _Number | None, defaults: JsonReader, key: str, fallback: _Number) -> _Number:
    """The flag's value, else the file's in the type of ``fallback``, else this. Raises
    ``UserError`` that names the file for a value that ``SamplingParams`` refuses.
    """
    if flag is not None:
        return flag
    return type(fallback)(_check(defaults, key)) if key in defaults.values else fallback


def _check(defaults: JsonReader, key: str) -> Any:
    """The file's value of a field of ``SamplingParams``."""
    value = defaults.values[key]
    try:
        SamplingParams(**{key: value})
    except UserError as error:
        raise UserError(f"{defaults.source}: {error}") from None
    return value


def eos_token_ids(config: ModelConfig, defaults: JsonReader) -> frozenset[int]:
    """The end-of-sequence ids of generation_config.json, else those of config.json. Raises
    ``UserError`` for what is no token id of the model.
    """
    found = defaults.values.get("eos_token_id")
    if found is None:
        ids = config.eos_token_ids
    else:
        ids = found if isinstance(found, list | tuple) else [found]
    # A bool is an int too.
    if not all(type(token_id) is int and 0 <= token_id < config.vocab_size for token_id in ids):
        raise defaults.fail("eos_token_id", found, f"token ids below {config.vocab_size}")
    return frozenset(ids)
