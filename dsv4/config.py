"""ModelConfig, from ``config.json`` in both dialects: frozen, validated, derived once.

Two dialects of ``config.json`` describe the same model (model.md#config-dialects): DeepSeek's own
(``compress_ratios``, ``num_hash_layers``, ``rope_scaling``) and the one of transformers
(``layer_types``, ``mlp_layer_types``, ``rope_parameters``). Both end in the same ``ModelConfig``;
nothing about the geometry comes from anywhere else.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dsv4.config_dialects import (
    CSA_RATIO,
    HCA_RATIO,
    SLIDING_WINDOW_ONLY,
    Yarn,
    compress_ratios,
    hash_layers,
    rope_head_dim,
    rope_theta,
    yarn,
)
from dsv4.errors import UserError, shorten
from dsv4.json_object import JsonReader, read_json_object
from dsv4.model_files import model_file

MODEL_TYPE = "deepseek_v4"
KIND_OF_RATIO = {SLIDING_WINDOW_ONLY: "SWA", CSA_RATIO: "CSA", HCA_RATIO: "HCA"}


@dataclass(frozen=True)
class DSpark:
    """Keys of the DSpark speculative module of the -DSpark, -0731 and -0813 releases
    (model.md#dspark).
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and constants of one DeepSeek-V4 model, by the names of ``config.json``
    (model.md#configuration).

    ``compress_ratios`` and ``hash_layers`` have one entry per main layer; ratio 0 is sliding window
    only, 4 is CSA, 128 is HCA.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    hash_layers: tuple[bool, ...]
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_nextn_predict_layers: int
    dspark: DSpark | None

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Reads ``folder/config.json``. Raises ``UserError`` for a missing, damaged or unsupported
        file.
        """
        path = model_file(folder, "config.json")
        return cls.from_dict(read_json_object(path), str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "config.json") -> "ModelConfig":
        """Builds the config from the parsed JSON of either dialect; ``source`` names it in errors
        (``UserError``).
        """
        if not isinstance(raw, dict):
            raise UserError(f"{source}: found {shorten(raw)}, expected an object")
        read = JsonReader(raw, source)
        _refuse_other_models(read)
        layers = read.integer("num_hidden_layers", 1, 1024)
        head_dim = read.integer("head_dim", 2, 4096)
        config = cls(
            vocab_size=read.integer("vocab_size", 1, 2**24),
            hidden_size=read.integer("hidden_size", 1, 2**17),
            num_hidden_layers=layers,
            num_attention_heads=read.integer("num_attention_heads", 1, 4096),
            head_dim=head_dim,
            qk_rope_head_dim=rope_head_dim(read, head_dim),
            q_lora_rank=read.integer("q_lora_rank", 1, 2**17),
            o_lora_rank=read.integer("o_lora_rank", 1, 2**17),
            o_groups=read.integer("o_groups", 1, 4096),
            sliding_window=read.integer("sliding_window", 1, 2**16),
            compress_ratios=compress_ratios(read, layers),
            hash_layers=hash_layers(read, layers),
            moe_intermediate_size=read.integer("moe_intermediate_size", 1, 2**17),
            n_routed_experts=read.integer("n_routed_experts", 1, 2**14),
            num_experts_per_tok=read.integer("num_experts_per_tok", 1, 64),
            routed_scaling_factor=read.number("routed_scaling_factor", 0.0, 1e4),
            swiglu_limit=read.number("swiglu_limit", 0.0, 1e6),
            index_n_heads=read.integer("index_n_heads", 1, 4096),
            index_head_dim=read.integer("index_head_dim", 2, 4096),
            index_topk=read.integer("index_topk", 1, 2**16),
            hc_mult=read.integer("hc_mult", 1, 16),
            hc_sinkhorn_iters=read.integer("hc_sinkhorn_iters", 1, 1000),
            hc_eps=read.number("hc_eps", 0.0, 1.0),
            rms_norm_eps=read.number("rms_norm_eps", 0.0, 1.0),
            rope_theta=rope_theta(read, "main", "rope_theta"),
            compress_rope_theta=rope_theta(read, "compress", "compress_rope_theta"),
            yarn=yarn(read),
            max_position_embeddings=read.integer("max_position_embeddings", 1, 2**31 - 1),
            bos_token_id=read.integer("bos_token_id", 0, 2**24)
            if "bos_token_id" in read.values
            else None,
            eos_token_ids=_eos_token_ids(read),
            num_nextn_predict_layers=read.integer("num_nextn_predict_layers", 0, 64, default=0),
            dspark=_dspark(read, layers),
        )
        _check_relations(config, read)
        return config


def layer_kinds(config: ModelConfig) -> tuple[str, ...]:
    """The kind of every layer: sliding window attention alone, compressed sparse, heavily
    compressed.
    """
    return tuple(KIND_OF_RATIO[ratio] for ratio in config.compress_ratios)


def _refuse_other_models(read: JsonReader) -> None:
    found = read.values.get("model_type")
    if found != MODEL_TYPE:
        raise read.fail(
            "model_type",
            found,
            f"{MODEL_TYPE!r} (V3, V4.1 and other architectures are not supported)",
        )
    for key, value in (
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
        ("norm_topk_prob", True),
        ("hidden_act", "silu"),
        ("n_shared_experts", 1),
        ("num_key_value_heads", 1),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("tie_word_embeddings", False),
    ):
        read.exactly(key, value)


def _eos_token_ids(read: JsonReader) -> tuple[int, ...]:
    value = read.values.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise read.fail("eos_token_id", value, "a token id or a list of token ids")
    return tuple(ids)


def _dspark(read: JsonReader, layers: int) -> DSpark | None:
    if "dspark_block_size" not in read.values:
        return None
    targets = read.values.get("dspark_target_layer_ids")
    if (
        not isinstance(targets, list)
        or not all(type(t) is int and 0 <= t < layers for t in targets)
        or not targets
    ):
        raise read.fail("dspark_target_layer_ids", targets, f"a list of layer ids below {layers}")
    if any(first >= second for first, second in pairwise(targets)):
        raise read.fail("dspark_target_layer_ids", targets, "layer ids in ascending order")
    return DSpark(
        block_size=read.integer("dspark_block_size", 1, 2**10),
        noise_token_id=read.integer("dspark_noise_token_id", 0, 2**24),
        target_layer_ids=tuple(targets),
        markov_rank=read.integer("dspark_markov_rank", 1, 2**17),
    )


def _check_relations(config: ModelConfig, read: JsonReader) -> None:
    if config.num_attention_heads % config.o_groups:
        raise read.fail(
            "o_groups",
            config.o_groups,
            f"a divisor of num_attention_heads {config.num_attention_heads}",
        )
    for key, width in (("head_dim", config.head_dim), ("index_head_dim", config.index_head_dim)):
        if config.qk_rope_head_dim % 2 or not 2 <= config.qk_rope_head_dim <= width:
            raise read.fail(
                "qk_rope_head_dim",
                config.qk_rope_head_dim,
                f"an even number from 2 to {key} {width}",
            )
    if not math.log2(config.index_head_dim).is_integer():
        raise read.fail(
            "index_head_dim", config.index_head_dim, "a power of two (Hadamard rotation)"
        )
    if config.num_experts_per_tok > config.n_routed_experts:
        raise read.fail(
            "num_experts_per_tok",
            config.num_experts_per_tok,
            f"at most {config.n_routed_experts} experts",
        )
    bos = () if config.bos_token_id is None else (config.bos_token_id,)
    for token in (*bos, *config.eos_token_ids):
        if token >= config.vocab_size:
            raise read.fail(
                "bos_token_id / eos_token_id", token, f"ids below vocab_size {config.vocab_size}"
            )
