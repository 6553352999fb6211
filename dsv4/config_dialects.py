"""The keys of ``config.json`` in which its two dialects differ (model.md#config-dialects).

DeepSeek writes ``compress_ratios``, ``num_hash_layers`` and ``rope_scaling``. transformers writes
``layer_types``, ``mlp_layer_types`` and ``rope_parameters``.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from dsv4.json_object import JsonReader

SLIDING_WINDOW_ONLY = 0
CSA_RATIO = 4
HCA_RATIO = 128

_T = TypeVar("_T")
_RATIO_OF_LAYER_TYPE = {
    "sliding_attention": SLIDING_WINDOW_ONLY,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": HCA_RATIO,
}


@dataclass(frozen=True)
class Yarn:
    """Static YaRN scaling of the compress RoPE table (model.md#rope); cos and sin stay unscaled."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


def rope_head_dim(read: JsonReader, head_dim: int) -> int:
    """Values of a head that are rotated, stated as a number or as a share; what is stated more than
    once is the same.
    """
    if "qk_rope_head_dim" in read.values:
        width = read.integer("qk_rope_head_dim", 2, head_dim)
    else:
        width = round(head_dim * read.number("partial_rotary_factor", 0.0, 1.0))
    for stated in (read, *_rope_tables(read).values()):
        if "partial_rotary_factor" not in stated.values:
            continue
        share = stated.number("partial_rotary_factor", 0.0, 1.0)
        if round(head_dim * share) != width:
            expected = f"{width / head_dim:g}, {width} of {head_dim} values"
            raise stated.fail("partial_rotary_factor", share, expected)
    return width


def _rope_tables(read: JsonReader) -> dict[str, JsonReader]:
    """What ``rope_parameters`` says of each table, by its name; of ``compress`` where it names
    none.
    """
    parameters = read.child("rope_parameters")
    if parameters is None:
        return {}
    tables = {name: parameters.child(name) for name in ("main", "compress")}
    named = {name: table for name, table in tables.items() if table is not None}
    return named or {"compress": parameters}


def _list(read: JsonReader, key: str, length: int) -> list[Any]:
    value = read.values[key]
    if not isinstance(value, list) or len(value) < length:
        found = f"{len(value)} entries" if isinstance(value, list) else value
        raise read.fail(key, found, f"a list with one entry for each of the {length} layers")
    return value


def compress_ratios(read: JsonReader, layers: int) -> tuple[int, ...]:
    """The ratio of every main layer, from ratios or from layer types; from both, they agree."""
    stated = {
        "compress_ratios": _stated_ratios(read, layers),
        "layer_types": _ratios_of_types(read, layers),
    }
    return _agreed(read, stated)


def _stated_ratios(read: JsonReader, layers: int) -> tuple[int, ...] | None:
    if "compress_ratios" not in read.values:
        return None
    ratios = _list(read, "compress_ratios", layers)
    tail = ratios[layers:]
    if any(ratio != SLIDING_WINDOW_ONLY for ratio in tail):
        raise read.fail("compress_ratios", tail, "only zeros after the main layers")
    for ratio in ratios[:layers]:
        if type(ratio) is not int or ratio not in (SLIDING_WINDOW_ONLY, CSA_RATIO, HCA_RATIO):
            raise read.fail("compress_ratios", ratio, "0, 4 or 128")
    return tuple(ratios[:layers])


def _ratios_of_types(read: JsonReader, layers: int) -> tuple[int, ...] | None:
    if "layer_types" not in read.values:
        return None
    types = _list(read, "layer_types", layers)
    unknown = [t for t in types if not isinstance(t, str) or t not in _RATIO_OF_LAYER_TYPE]
    if unknown or len(types) != layers:
        expected = f"{layers} of {', '.join(_RATIO_OF_LAYER_TYPE)}"
        raise read.fail("layer_types", unknown or len(types), expected)
    rates = read.child("compress_rates")
    if rates is not None:
        rates.exactly("compressed_sparse_attention", CSA_RATIO)
        rates.exactly("heavily_compressed_attention", HCA_RATIO)
    return tuple(_RATIO_OF_LAYER_TYPE[t] for t in types)


def hash_layers(read: JsonReader, layers: int) -> tuple[bool, ...]:
    """Whether each main layer routes by hash, from their number or from layer types; from both,
    they agree.
    """
    stated = {
        "num_hash_layers": _first_hash_layers(read, layers),
        "mlp_layer_types": _hash_layers_of_types(read, layers),
    }
    return _agreed(read, stated)


def _first_hash_layers(read: JsonReader, layers: int) -> tuple[bool, ...] | None:
    if "num_hash_layers" not in read.values:
        return None
    hashed = read.integer("num_hash_layers", 0, layers)
    return tuple(layer < hashed for layer in range(layers))


def _hash_layers_of_types(read: JsonReader, layers: int) -> tuple[bool, ...] | None:
    if "mlp_layer_types" not in read.values:
        return None
    types = _list(read, "mlp_layer_types", layers)
    unknown = [t for t in types if t not in ("hash_moe", "moe")]
    if unknown or len(types) != layers:
        raise read.fail("mlp_layer_types", unknown or len(types), f"{layers} of hash_moe, moe")
    return tuple(t == "hash_moe" for t in types)


def _agreed(read: JsonReader, stated: dict[str, tuple[_T, ...] | None]) -> tuple[_T, ...]:
    """What every layer is by the one key, by the other or by both. Raises ``UserError``."""
    (key, by_key), (other_key, by_other) = stated.items()
    if by_key is None:
        if by_other is None:
            raise read.fail(key, None, f"{key} or {other_key}")
        return by_other
    for layer, (value, other) in enumerate(zip(by_key, by_other or by_key, strict=True)):
        if value != other:
            raise read.fail(f"{key}: layer {layer}", value, f"{other} as in {other_key}")
    return by_key


def rope_theta(read: JsonReader, table: str, key: str) -> float:
    """The base of a RoPE table, in either dialect; where both state it, it is the same."""
    parameters = read.child("rope_parameters")
    nested = parameters.child(table) if parameters is not None else None
    if nested is None:
        return read.number(key, 1.0, 1e12)
    theta = nested.number("rope_theta", 1.0, 1e12)
    if read.values.get(key, theta) != theta:
        raise read.fail(key, read.values[key], f"{theta:g} as in rope_parameters: {table}")
    return theta


def yarn(read: JsonReader) -> Yarn | None:
    """YaRN of the compress table; the main table never has one (model.md#rope). Where both dialects
    state it, it is the same. Raises ``UserError``.
    """
    tables = _rope_tables(read)
    if "main" in tables:
        for key in ("rope_type", "type"):
            tables["main"].exactly(key, "default")
    stated = (read.child("rope_scaling"), tables.get("compress"))
    found = [_yarn(one) for one in stated if one is not None and _kinds(one)]
    # One without a type says nothing, also where the other dialect does.
    is_untyped = stated[0] is not None and stated[0].values and not _kinds(stated[0])
    if not found or is_untyped:
        # A model that was trained with YaRN would compute something, and nothing would show it.
        stated_there = read.values.get("rope_scaling", read.values.get("rope_parameters"))
        expected = "an object with the type 'yarn', or 'default' for a model without YaRN"
        raise read.fail("rope_scaling", stated_there, expected)
    if found[0] != found[-1]:
        raise read.fail("rope_scaling", read.values["rope_scaling"], "the same as rope_parameters")
    return found[0]


def _kinds(scaling: JsonReader) -> list[Any]:
    return [scaling.values[key] for key in ("rope_type", "type") if key in scaling.values]


def _yarn(scaling: JsonReader) -> Yarn | None:
    kind = _kinds(scaling)[0]
    scaling.exactly("type", kind)
    if kind == "default":
        return None
    if kind != "yarn":
        raise scaling.fail("type", kind, "'yarn' or 'default'")
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if scaling.values.get(key) not in (None, 1.0):
            raise scaling.fail(
                key, scaling.values[key], "1.0 (DeepSeek-V4 does not scale cos, sin or the softmax)"
            )
    if scaling.values.get("truncate") not in (None, True):
        expected = "true (DeepSeek-V4 rounds the bounds between which YaRN blends)"
        raise scaling.fail("truncate", scaling.values["truncate"], expected)
    turns = Yarn(
        factor=scaling.number("factor", 0.0, 1e6),
        original_max_position_embeddings=scaling.integer(
            "original_max_position_embeddings", 1, 2**31 - 1
        ),
        beta_fast=scaling.number("beta_fast", 0.0, 1e6) if "beta_fast" in scaling.values else 32.0,
        beta_slow=scaling.number("beta_slow", 0.0, 1e6) if "beta_slow" in scaling.values else 1.0,
    )
    if turns.beta_fast < turns.beta_slow:
        expected = f"at least beta_slow, {turns.beta_slow:g}"
        raise scaling.fail("beta_fast", turns.beta_fast, expected)
    return turns
