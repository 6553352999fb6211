"""The trained model's parameters: initial values, storage kinds, fake quantisation, and saving."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4.checkpoint import load_weights, open_checkpoint
from dsv4.checkpoint.names import Dialect, from_native
from dsv4.config import ModelConfig
from dsv4.demo.training import geometry
from dsv4.weights.quant import QuantFormat, QuantTensor
from dsv4.weights.quantize import quantize

_FP32 = re.compile(
    r"(_hc\.|hc_head\.|sinks|position_bias|mlp\.gate\.weight|e_score_correction_bias)"
)
_FP8 = re.compile(
    r"(q_a_proj|q_b_proj|self_attn\.kv_proj|o_a_proj|o_b_proj|shared_experts\.\w+_proj)\.weight$"
)
_SHARD_BYTES = 14 << 20
SEED = 20260801


def build_model() -> Any:
    """transformers' ``DeepseekV4ForCausalLM`` of the demo geometry with initial values for training
    (float32).
    """
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(SEED)
    model: Any = DeepseekV4ForCausalLM(DeepseekV4Config(**copy.deepcopy(geometry.CONFIG)))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _initialise(name, tensor)
        for index, layer in enumerate(model.model.layers):
            for hc in (layer.attn_hc, layer.ffn_hc):
                hc.base.copy_(_stream_bias(index))
            if layer.self_attn.layer_type == "compressed_sparse_attention":
                _match_content(layer.self_attn)
    return model


def load_model(folder: Path) -> Any:
    """transformers' model (float32) with the weights of a phase (``save_shards``), or with those of
    a checkpoint of the demo geometry, dequantised.
    """
    native = (folder / "config.json").exists()
    state = _dequantized(folder) if native else load_shards(folder)
    model = build_model()
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
    return model


def _dequantized(folder: Path) -> dict[str, Tensor]:
    """The checkpoint's weights under transformers' names."""
    checkpoint = open_checkpoint(folder)
    config = ModelConfig.from_dict(checkpoint.raw_config)
    loaded = load_weights(checkpoint, config, device_of=lambda _: torch.device("cpu"))
    values = {
        name: weight.dequantize() if isinstance(weight, QuantTensor) else weight
        for name, weight in loaded.items()
    }
    for name in [name for name in values if name.endswith(".experts.w1.weight")]:
        up = values.pop(name.replace(".w1.", ".w3."))
        values[name.replace(".w1.", ".w13.")] = torch.cat((values.pop(name), up), 1)
    return {from_native(name, Dialect.HF): value for name, value in values.items()}


def _initialise(name: str, tensor: Tensor) -> None:
    if name.endswith("tid2eid"):
        experts = geometry.CONFIG["n_routed_experts"]
        tensor.copy_(torch.rand(tensor.shape[0], experts).argsort(-1)[:, : tensor.shape[1]])
    elif name.endswith("embed_tokens.weight"):
        tensor.normal_(std=0.3)
    elif name.endswith(("hc.fn", "hc_fn")):
        tensor.normal_(std=0.02)
    elif name.endswith(("hc.scale", "hc_scale")):
        tensor.fill_(0.2)
    elif re.search(r"(o_b_proj\.weight|down_proj(\.weight)?)$", name):
        tensor.normal_(std=0.5 / math.sqrt(tensor.shape[-1]))
    elif name.endswith("lm_head.weight"):
        tensor.normal_(std=0.02)
    elif tensor.ndim >= 2 and "position_bias" not in name:
        tensor.normal_(std=0.8 / math.sqrt(tensor.shape[-1]))


def _match_content(attn: Any) -> None:
    """Starts half of the heads (and of the indexer's) so that a query finds the compressed entries
    holding its own token.

    Key and query share one random projection C: k = C x pooled over the entry's tokens, q = C Rᵀ R
    x with orthonormal rows R in the low-rank step. With plain random values, recall stayed at
    chance for ten thousand steps.
    """
    low_rank = attn.q_a_proj.weight
    torch.nn.init.orthogonal_(low_rank)
    indexer = attn.compressor.indexer
    for compressor, q_proj, width in (
        (attn.compressor, attn.q_b_proj, 512),
        (indexer, indexer.q_b_proj, 128),
    ):
        shared = compressor.kv_proj.weight[:width].clone()
        compressor.kv_proj.weight[width:].copy_(shared)
        heads = q_proj.weight.shape[0] // width
        matching = q_proj.weight.view(heads, width, -1)[: heads // 2]
        # The rotated dims would blur the match over distance; they keep their random values.
        matching[:, : width - 64] = (shared @ low_rank.T)[: width - 64] * 1.5
    attn.compressor.kv_norm.weight.fill_(1.5)


def _stream_bias(index: int) -> Tensor:
    """mHC base: each layer reads and writes one stream a little more than the others; streams pass
    through.
    """
    favoured = torch.nn.functional.one_hot(torch.tensor(index % 4), 4).float()
    mixing = torch.eye(4).flatten() * 4 - 2
    return torch.cat((favoured - 0.5, 0.5 * favoured, mixing))


def to_training_dtypes(model: Any) -> None:
    """bfloat16 matrices and norms; float32 for mHC, sinks, positional biases and the router.

    A norm has the dtype of what it normalises: transformers before 5.18 returns the wider one.
    """
    for name, parameter in model.named_parameters():
        if not _FP32.search(name):
            parameter.data = parameter.data.bfloat16()


def fake_quantized(name: str, weight: Tensor) -> Tensor:
    """``weight`` (float32) as the shipped file stores it, dequantised: NVFP4 experts, FP8 linears,
    BF16 floor, F32 rest.
    """
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return quantize(weight, QuantFormat.NVFP4).dequantize()
    if _FP8.search(name):
        return quantize(weight, QuantFormat.FP8_BLOCK128).dequantize()
    if re.search(r"(_hc\.|hc_head\.|sinks|position_bias|e_score)", name):
        return weight
    return weight.bfloat16().float()


def save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Writes ``part-N.safetensors`` files below 16 MiB each."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    for index, shard in enumerate(shards):
        save_file(shard, folder / f"part-{index}.safetensors")


def load_shards(folder: Path) -> dict[str, Tensor]:
    """Reads what ``save_shards`` wrote. Raises ``FileNotFoundError`` for a folder without parts."""
    files = sorted(folder.glob("part-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: found no part-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
