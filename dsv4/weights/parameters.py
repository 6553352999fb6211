"""The canonical list of a model's parameters: name, logical shape and role, derived from
``ModelConfig`` alone.

Names are those of the native checkpoint dialect (model.md#parameters). Routed experts are stacked:
``layers.N.ffn.experts.w1.weight`` has shape ``[X, F, E]`` and stands for the X tensors
``layers.N.ffn.experts.{x}.w1.weight``. The loader checks a checkpoint against this list in both
directions, the synthetic generator fills it, the memory plan sums it, the layers read from it.
"""

import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from dsv4.config import CSA_RATIO, ModelConfig

MtpKind = Literal["classic", "dspark"]
_STAGE = re.compile(r"mtp\.([0-9]{1,3})\.")


class Role(enum.Enum):
    """The role of a parameter. It decides the storage formats.

    LINEAR and EXPERT matrices may be quantised. FLOOR matrices stay 16 or 32 bit (the "precision
    floor": embeddings, head, router gate, compressor and indexer helper projections). NORM is a
    bfloat16 or float32 vector, FLOAT is float32 (mHC, sinks, biases, positional biases), TABLE is
    int64 (hash routing).
    """

    LINEAR = "linear"
    EXPERT = "expert"
    FLOOR = "floor"
    NORM = "norm"
    FLOAT = "float"
    TABLE = "table"


@dataclass(frozen=True)
class Parameter:
    """One logical parameter. ``shape`` is ``[out, in]`` for matrices, ``[X, out, in]`` for routed
    experts.
    """

    name: str
    shape: tuple[int, ...]
    role: Role


def parameters(
    config: ModelConfig, mtp: MtpKind | None = None, stages: int | None = None
) -> dict[str, Parameter]:
    """All parameters of the main model by name, in execution order; with ``mtp``, the speculative
    module's as well, which has ``stages`` blocks (None: as many as published ones).
    """
    found = list(_main_parameters(config))
    if mtp is not None:
        found += _mtp_parameters(config, mtp, stages or mtp_stages(config, mtp))
    return {parameter.name: parameter for parameter in found}


def mtp_stages(config: ModelConfig, mtp: MtpKind) -> int:
    """Number of ``mtp.{s}`` blocks of the published modules: one for MTP, one per target layer for
    DSpark (model.md#releases). ``num_nextn_predict_layers`` is 1 for both.
    """
    if mtp == "classic":
        return 1
    assert config.dspark is not None
    return len(config.dspark.target_layer_ids)


def shown_mtp(names: Iterable[str]) -> tuple[MtpKind, int] | None:
    """The kind of speculative module that names of tensors or parameters show, and how many blocks
    ``mtp.{s}`` it has; None without one.
    """
    own = [name for name in names if name.startswith("mtp.")]
    if not own:
        return None
    dspark = any(".main_proj." in name or ".markov_head." in name for name in own)
    stages = (int(match[1]) for match in map(_STAGE.match, own) if match is not None)
    return "dspark" if dspark else "classic", max(stages, default=-1) + 1


def layer_of(name: str) -> int | None:
    """Index of the main layer a parameter belongs to; None for embedding, head, final norm and
    ``mtp.*``.
    """
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" else None


def _main_parameters(config: ModelConfig) -> Iterator[Parameter]:
    yield Parameter("embed.weight", (config.vocab_size, config.hidden_size), Role.FLOOR)
    for layer in range(config.num_hidden_layers):
        yield from _block(
            config, f"layers.{layer}", config.compress_ratios[layer], config.hash_layers[layer]
        )
    yield from _hc_head(config, "hc_head")
    yield Parameter("norm.weight", (config.hidden_size,), Role.NORM)
    yield Parameter("head.weight", (config.vocab_size, config.hidden_size), Role.FLOOR)


def _block(config: ModelConfig, prefix: str, ratio: int, hashed: bool) -> Iterator[Parameter]:
    mixes = (2 + config.hc_mult) * config.hc_mult
    for sublayer in ("attn", "ffn"):
        yield Parameter(
            f"{prefix}.hc_{sublayer}_fn", (mixes, config.hc_mult * config.hidden_size), Role.FLOAT
        )
        yield Parameter(f"{prefix}.hc_{sublayer}_base", (mixes,), Role.FLOAT)
        yield Parameter(f"{prefix}.hc_{sublayer}_scale", (3,), Role.FLOAT)
        yield Parameter(f"{prefix}.{sublayer}_norm.weight", (config.hidden_size,), Role.NORM)
    yield from _attention(config, f"{prefix}.attn", ratio)
    yield from _moe(config, f"{prefix}.ffn", hashed)


def _attention(config: ModelConfig, prefix: str, ratio: int) -> Iterator[Parameter]:
    heads_width = config.num_attention_heads * config.head_dim
    low_rank_width = config.o_groups * config.o_lora_rank
    yield Parameter(f"{prefix}.attn_sink", (config.num_attention_heads,), Role.FLOAT)
    yield Parameter(f"{prefix}.wq_a.weight", (config.q_lora_rank, config.hidden_size), Role.LINEAR)
    yield Parameter(f"{prefix}.q_norm.weight", (config.q_lora_rank,), Role.NORM)
    yield Parameter(f"{prefix}.wq_b.weight", (heads_width, config.q_lora_rank), Role.LINEAR)
    yield Parameter(f"{prefix}.wkv.weight", (config.head_dim, config.hidden_size), Role.LINEAR)
    yield Parameter(f"{prefix}.kv_norm.weight", (config.head_dim,), Role.NORM)
    yield Parameter(
        f"{prefix}.wo_a.weight", (low_rank_width, heads_width // config.o_groups), Role.LINEAR
    )
    yield Parameter(f"{prefix}.wo_b.weight", (config.hidden_size, low_rank_width), Role.LINEAR)
    if ratio:
        yield from _compressor(config, f"{prefix}.compressor", ratio, config.head_dim)
    if ratio == CSA_RATIO:
        index_width = config.index_n_heads * config.index_head_dim
        yield Parameter(
            f"{prefix}.indexer.wq_b.weight", (index_width, config.q_lora_rank), Role.LINEAR
        )
        yield Parameter(
            f"{prefix}.indexer.weights_proj.weight",
            (config.index_n_heads, config.hidden_size),
            Role.FLOOR,
        )
        yield from _compressor(config, f"{prefix}.indexer.compressor", ratio, config.index_head_dim)


def _compressor(config: ModelConfig, prefix: str, ratio: int, head_dim: int) -> Iterator[Parameter]:
    width = 2 * head_dim if ratio == CSA_RATIO else head_dim
    yield Parameter(f"{prefix}.ape", (ratio, width), Role.FLOAT)
    yield Parameter(f"{prefix}.wkv.weight", (width, config.hidden_size), Role.FLOOR)
    yield Parameter(f"{prefix}.wgate.weight", (width, config.hidden_size), Role.FLOOR)
    yield Parameter(f"{prefix}.norm.weight", (head_dim,), Role.NORM)


def _moe(config: ModelConfig, prefix: str, hashed: bool) -> Iterator[Parameter]:
    experts = config.n_routed_experts
    width = config.moe_intermediate_size
    hidden = config.hidden_size
    yield Parameter(f"{prefix}.gate.weight", (experts, hidden), Role.FLOOR)
    if hashed:
        yield Parameter(
            f"{prefix}.gate.tid2eid", (config.vocab_size, config.num_experts_per_tok), Role.TABLE
        )
    else:
        yield Parameter(f"{prefix}.gate.bias", (experts,), Role.FLOAT)
    for projection, shape in (
        ("w1", (width, hidden)),
        ("w2", (hidden, width)),
        ("w3", (width, hidden)),
    ):
        yield Parameter(f"{prefix}.experts.{projection}.weight", (experts, *shape), Role.EXPERT)
        yield Parameter(f"{prefix}.shared_experts.{projection}.weight", shape, Role.LINEAR)


def _hc_head(config: ModelConfig, prefix: str) -> Iterator[Parameter]:
    yield Parameter(
        f"{prefix}_fn", (config.hc_mult, config.hc_mult * config.hidden_size), Role.FLOAT
    )
    yield Parameter(f"{prefix}_base", (config.hc_mult,), Role.FLOAT)
    yield Parameter(f"{prefix}_scale", (1,), Role.FLOAT)


def _mtp_parameters(config: ModelConfig, mtp: MtpKind, stages: int) -> Iterator[Parameter]:
    hidden = config.hidden_size
    for stage in range(stages):
        prefix = f"mtp.{stage}"
        yield from _block(config, prefix, ratio=0, hashed=False)
        if mtp == "classic":
            yield Parameter(f"{prefix}.e_proj.weight", (hidden, hidden), Role.LINEAR)
            yield Parameter(f"{prefix}.h_proj.weight", (hidden, hidden), Role.LINEAR)
            yield Parameter(f"{prefix}.enorm.weight", (hidden,), Role.NORM)
            yield Parameter(f"{prefix}.hnorm.weight", (hidden,), Role.NORM)
            yield Parameter(f"{prefix}.norm.weight", (hidden,), Role.NORM)
            yield from _hc_head(config, f"{prefix}.hc_head")
    if mtp == "dspark":
        yield from _dspark_ends(config, last=stages - 1)


def _dspark_ends(config: ModelConfig, last: int) -> Iterator[Parameter]:
    assert config.dspark is not None
    hidden = config.hidden_size
    rank = config.dspark.markov_rank
    taps = len(config.dspark.target_layer_ids)
    yield Parameter("mtp.0.main_proj.weight", (hidden, taps * hidden), Role.LINEAR)
    yield Parameter("mtp.0.main_norm.weight", (hidden,), Role.NORM)
    yield Parameter(f"mtp.{last}.norm.weight", (hidden,), Role.NORM)
    yield from _hc_head(config, f"mtp.{last}.hc_head")
    yield Parameter(
        f"mtp.{last}.markov_head.markov_w1.weight", (config.vocab_size, rank), Role.FLOOR
    )
    yield Parameter(
        f"mtp.{last}.markov_head.markov_w2.weight", (config.vocab_size, rank), Role.FLOOR
    )
    yield Parameter(f"mtp.{last}.confidence_head.proj.weight", (1, hidden + rank), Role.FLOOR)
