"""Tiny random models for the whole-model tests: their config.json, their weights, and engines that
run them.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, ModelConfig
from dsv4.layers.weights import Weights
from dsv4.ops import TORCH, TORCH_PACKING, Ops
from dsv4.ops.tables import DirectTable
from dsv4.parallel.placement import Placement
from dsv4.weights.parameters import Parameter, Role, parameters
from dsv4.weights.quant import QuantTensor

CPU = torch.device("cpu")
YARN = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}


def raw_config(
    ratios: tuple[int, ...] = (0, 4, 128, 4), hash_layers: int = 1, **changes: Any
) -> dict[str, Any]:
    """A ``config.json`` in DeepSeek's dialect. 32 index heads: with few, all relus of a score are
    often 0 and tie.
    """
    return {
        "model_type": "deepseek_v4",
        "vocab_size": 89,
        "hidden_size": 64,
        "num_hidden_layers": len(ratios),
        "compress_ratios": list(ratios),
        "num_hash_layers": hash_layers,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "sliding_window": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 0.5,
        "index_n_heads": 32,
        "index_head_dim": 32,
        "index_topk": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        # Equal in the published models; here an exchange of the two shows.
        "hc_eps": 1e-3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": dict(YARN),
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        **changes,
    }


def small_config(
    ratios: tuple[int, ...] = (0, 4, 128, 4), hash_layers: int = 1, **changes: Any
) -> dict[str, Any]:
    """``raw_config`` with fewer Sinkhorn iterations and narrower projections: for tests that take
    many steps.
    """
    cheap = {
        "hc_sinkhorn_iters": 3,
        "num_attention_heads": 2,
        "qk_rope_head_dim": 16,
        "index_n_heads": 16,
    }
    return raw_config(ratios, hash_layers, **{**cheap, **changes})


def random_weights(config: ModelConfig, seed: int = 0) -> Weights:
    """Every parameter of ``config``, float32, with values that make every one of them matter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: wrap(
            parameter, random_values(name, parameter.shape, config.n_routed_experts, generator)
        )
        for name, parameter in parameters(config).items()
    }


def random_values(
    name: str, shape: tuple[int, ...], experts: int, generator: torch.Generator
) -> Tensor:
    """Values for the parameter with this native name."""
    if name.endswith("tid2eid"):
        return (
            torch.rand((shape[0], experts), generator=generator)
            .argsort(-1)[:, : shape[1]]
            .contiguous()
        )
    values = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * values
    if name.endswith(("attn_sink", "ape", "_base", "gate.bias")):
        return 0.5 * values
    if name.endswith("_fn"):
        return 0.1 * values
    if name.endswith("_scale"):
        return 0.5 + torch.rand(shape, generator=generator)
    return values * shape[-1] ** -0.5


def wrap(parameter: Parameter, values: Tensor) -> QuantTensor | Tensor:
    """The form in which ``Engine`` takes a parameter."""
    return (
        QuantTensor.dense(values)
        if parameter.role in (Role.LINEAR, Role.EXPERT, Role.FLOOR)
        else values
    )


def direct(ops: Ops) -> DirectTable:
    """A table of these ops and the layouts of the torch ops."""
    return DirectTable(TORCH_PACKING, ops)


def tiny_engine(
    raw: dict[str, Any] | None = None, *, seed: int = 0, ops: Ops = TORCH, **settings: Any
) -> Engine:
    """An engine of random weights on the CPU; float32 and caches that are not quantised unless
    ``settings`` differ.
    """
    config = ModelConfig.from_dict(small_config() if raw is None else raw)
    exact = {"device": "cpu", "kv_dtype": "bf16", "compute_dtype": "float32", "max_context": 1024}
    weights = random_weights(config, seed)
    placement = Placement.of_layers((CPU,) * config.num_hidden_layers)
    return Engine(config, EngineConfig(**{**exact, **settings}), weights, placement, direct(ops))


def random_ids(count: int, vocab_size: int = 89, seed: int = 0) -> list[int]:
    """Token ids, without the EOS id 1."""
    ids = torch.randint(2, vocab_size, (count,), generator=torch.Generator().manual_seed(seed))
    return ids.tolist()
