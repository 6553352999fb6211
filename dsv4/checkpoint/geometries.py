"""Values of ``config.json`` for synthetic weights: a small model, and the published ones
(model.md#geometry).
"""

from typing import Any, Literal, get_args

from dsv4.errors import UserError

Geometry = Literal["v4-flash", "v4-pro"]

_COMMON = {
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "num_hash_layers": 3,
    "num_experts_per_tok": 6,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
_GEOMETRIES: dict[str, dict[str, Any]] = {
    "v4-flash": {
        **_COMMON,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "index_topk": 512,
        "routed_scaling_factor": 1.5,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
    },
    "v4-pro": {
        **_COMMON,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 384,
        "index_topk": 1024,
        "routed_scaling_factor": 2.5,
        "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
    },
}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A small valid ``config.json`` with every layer kind: SWA, CSA, HCA, CSA; hash routing in the
    first two layers.

    ``overrides`` replace or add keys.
    """
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 256,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 2,
        "sliding_window": 16,
        "compress_ratios": [0, 4, 128, 4, 0],
        "num_hash_layers": 2,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 1048576,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "n_shared_experts": 1,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **overrides,
    }


def geometry_config(name: Geometry, layers: int | None = None) -> dict[str, Any]:
    """``config.json`` of a published geometry, cut to its first ``layers`` layers if given.

    Raises ``UserError`` for an unknown name or a number of layers that the model does not have.
    """
    if name not in get_args(Geometry):
        raise UserError(
            f"--geometry: found {name!r}, expected one of {', '.join(get_args(Geometry))}"
        )
    # The small model has the keys in which the published ones do not differ.
    config = tiny_config(**_GEOMETRIES[name])
    if layers is None:
        return config
    if not 1 <= layers <= config["num_hidden_layers"]:
        raise UserError(f"--layers: found {layers}, expected 1 to {config['num_hidden_layers']}")
    cut = {"num_hidden_layers": layers, "num_hash_layers": min(layers, config["num_hash_layers"])}
    return {
        **config,
        **cut,
        "compress_ratios": config["compress_ratios"][:layers],
        "num_nextn_predict_layers": 0,
    }
