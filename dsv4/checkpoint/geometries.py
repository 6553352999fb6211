"""``config.json`` values of the published models, for synthetic weights (model.md#geometry)."""

from typing import Any, Literal, get_args

from dsv4.checkpoint.synthetic import tiny_config
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


def geometry_config(name: Geometry, layers: int | None = None) -> dict[str, Any]:
    """``config.json`` of a published geometry, cut to its first ``layers`` layers if given.

    Raises ``UserError`` for an unknown name or a number of layers that the model does not have.
    """
    if name not in get_args(Geometry):
        raise UserError(
            f"--geometry: found {name!r}, expected one of {', '.join(get_args(Geometry))}"
        )
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
