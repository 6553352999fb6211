"""The oracle: transformers' DeepseekV4ForCausalLM with random weights, saved as a checkpoint our
engine loads.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig
from dsv4.ops import TORCH, Ops
from tests.model.tiny import direct, random_values

if TYPE_CHECKING:
    from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM


def random_oracle(raw: dict[str, Any], seed: int = 0) -> "DeepseekV4ForCausalLM":
    """A float32 model of this config.json in evaluation mode."""
    # Imported by the tests that need it: this costs every test process some seconds.
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = DeepseekV4Config(**{key: value for key, value in raw.items() if key != "model_type"})
    config._attn_implementation = "eager"
    model = DeepseekV4ForCausalLM(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        tensor.copy_(
            random_values(
                native_style(name), tuple(tensor.shape), raw["n_routed_experts"], generator
            )
        )
    return model


def native_style(name: str) -> str:
    """Enough of the native name for ``random_values`` to know the kind of parameter."""
    endings = {"sinks": "attn_sink", "position_bias": "ape", "e_score_correction_bias": "gate.bias"}
    endings |= {
        f"{sub}_hc.{part}": f"hc_{sub}_{part}"
        for sub in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    }
    return next(
        (name.replace(ours, theirs) for ours, theirs in endings.items() if name.endswith(ours)),
        name,
    )


def load_saved(
    model: "DeepseekV4ForCausalLM", folder: Path, ops: Ops = TORCH, **settings: Any
) -> Engine:
    """``save_pretrained`` into ``folder``, then ``Engine.load`` of it, float32 and without
    quantised caches.
    """
    model.save_pretrained(folder)
    exact = {"device": "cpu", "kv_dtype": "bf16", "compute_dtype": "float32", "max_context": 1024}
    return Engine.load(
        folder, EngineConfig(**{**exact, **settings}), change_table=lambda _: direct(ops)
    )


@torch.inference_mode()
def oracle_trace(model: "DeepseekV4ForCausalLM", token_ids: list[int]) -> dict[str, Any]:
    """Streams after each block, final hidden state and logits, in the shape of ``Engine.trace``."""
    layers: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output: layers.append(output[0]))
        for layer in model.model.layers
    ]
    output = model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {"layers": layers, "final": output.hidden_states[-1][0], "logits": output.logits[0]}


def relative_error(found: Tensor, reference: Tensor) -> float:
    """max |found − reference| / max |reference|."""
    assert found.shape == reference.shape, (
        f"found {tuple(found.shape)}, expected {tuple(reference.shape)}"
    )
    return float((found - reference).abs().max() / reference.abs().max())
