"""One decoder layer of transformers in float32 on the CPU, whose experts are read one at a time."""

from typing import Any

import torch
from torch import Tensor

from dsv4.checkpoint import Dialect
from dsv4.checkpoint.layer_weights import LayerSource
from dsv4.checkpoint.names import from_native
from dsv4.errors import UserError
from dsv4.validate.layer_walk import Computed
from dsv4.validate.one_layer import Given, Values
from dsv4.weights.on_demand import WeightOnDemand
from dsv4.weights.quant import QuantTensor

_CPU = torch.device("cpu")
_EXPERTS = ".ffn.experts."


class TransformersLayers:
    """Layers as transformers computes them from weights decoded to float32; nothing else is
    quantised there.

    Raises ``UserError`` when transformers is not installed.
    """

    def __init__(self, source: LayerSource) -> None:
        try:
            from transformers.models.deepseek_v4 import DeepseekV4Config
        except ImportError:
            raise UserError(
                "--reference: transformers with DeepseekV4ForCausalLM is not installed"
            ) from None
        self._source = source
        declared = ("quantization_config", "expert_dtype")
        values = {key: value for key, value in source.raw_config.items() if key not in declared}
        self._config = DeepseekV4Config.from_dict(values)
        self._config._attn_implementation = "eager"
        self._config._experts_implementation = "eager"

    def choices(self, layer: int) -> Values:
        """See ``Reference``."""
        return {}

    @torch.inference_mode()
    def run(self, layer: int, given: Given, found: Values, chunk: int) -> Computed:
        """The streams after the layer, of all tokens in one step. See ``Reference``."""
        from transformers.masking_utils import create_sliding_window_causal_mask
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

        positions = torch.arange(len(given.token_ids))[None]
        streams = given.streams_TME.float().contiguous()[None]
        x = streams[:, :, 0]
        mask = create_sliding_window_causal_mask(
            config=self._config,
            inputs_embeds=x,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        rotary = DeepseekV4RotaryEmbedding(self._config)
        ropes = {kind: rotary(x, positions, layer_type=kind) for kind in ("main", "compress")}
        module = self._load(layer)
        # Their tables are no part of a checkpoint.
        for part in list(module.modules()):
            for name, child in part.named_children():
                if isinstance(child, DeepseekV4RotaryEmbedding):
                    part.add_module(name, rotary)
        left = module(
            streams,
            position_embeddings=ropes,
            position_ids=positions,
            attention_mask=mask,
            input_ids=torch.tensor([given.token_ids], dtype=torch.int64),
            past_key_values=None,
        )
        return Computed({f"layers.{layer}.streams": left[0]}, {})

    def _load(self, layer: int) -> Any:
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4DecoderLayer

        with torch.device("meta"):
            module = DeepseekV4DecoderLayer(self._config, layer).eval()
        weights = self._source.weights(layer, _CPU, on_demand=True)
        prefix = f"model.layers.{layer}."
        experts: Any = module.mlp.experts
        del experts.gate_up_proj
        del experts.down_proj
        w1, w2, w3 = (
            weights.pop(f"layers.{layer}{_EXPERTS}{name}.weight") for name in ("w1", "w2", "w3")
        )
        experts.gate_up_proj = _Experts(w1, w3)
        experts.down_proj = _Experts(w2)
        state = {
            from_native(name, Dialect.HF).removeprefix(prefix): _decoded(weight)
            for name, weight in weights.items()
        }
        module.load_state_dict(state, strict=True, assign=True)
        return module


class _Experts:
    """Stands for a stacked parameter: the rows of an expert in one or two weights, read now."""

    def __init__(self, *weights: QuantTensor | WeightOnDemand | Tensor) -> None:
        self._weights = [weight for weight in weights if isinstance(weight, WeightOnDemand)]

    def __getitem__(self, expert: Tensor) -> Tensor:
        return torch.cat([weight[int(expert)].dequantize() for weight in self._weights])


def _decoded(weight: QuantTensor | WeightOnDemand | Tensor) -> Tensor:
    if isinstance(weight, Tensor):
        return weight if weight.dtype == torch.int64 else weight.float()
    return weight.dequantize()
