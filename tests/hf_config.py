"""A native ``config.json`` in the dialect of transformers."""

from typing import Any

from dsv4.checkpoint import tiny_config

NATIVE_ONLY = (
    "compress_ratios",
    "num_hash_layers",
    "rope_scaling",
    "rope_theta",
    "compress_rope_theta",
)
LAYER_TYPES = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}


def hf_config(**overrides: Any) -> dict[str, Any]:
    """The tiny config as transformers rewrites it (model.md#config-dialects)."""
    raw = tiny_config()
    main = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    yarn = {
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    compress = {"rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0, **yarn}
    kept = {
        key: value for key, value in raw.items() if key not in (*NATIVE_ONLY, "qk_rope_head_dim")
    }
    return {
        **kept,
        "layer_types": [LAYER_TYPES[ratio] for ratio in raw["compress_ratios"][:4]],
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"main": main, "compress": compress},
        **overrides,
    }
