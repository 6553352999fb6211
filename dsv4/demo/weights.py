"""The trained model's parameters: initial values, storage kinds, fake quantisation, and saving in native names."""

import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4.demo import geometry
from dsv4.quant import QuantFormat, quantize

_FP32 = re.compile(r"(norm\.weight|_hc\.|hc_head\.|sinks|position_bias|mlp\.gate\.weight|e_score_correction_bias)")
_FP8 = re.compile(r"(q_a_proj|q_b_proj|self_attn\.kv_proj|o_a_proj|o_b_proj|shared_experts\.\w+_proj)\.weight$")
_SHARD_BYTES = 14 << 20
SEED = 20260801

# Order matters: the first pattern that matches renames (spec §7.3).
_NATIVE = (
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj\.", ".attn.indexer.wq_b."),
    (r"\.self_attn\.compressor\.indexer\.scorer\.", ".attn.indexer."),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.self_attn\.", ".attn."),
    (r"compressor\.kv_proj", "compressor.wkv"),
    (r"compressor\.gate_proj", "compressor.wgate"),
    (r"compressor\.kv_norm", "compressor.norm"),
    (r"compressor\.position_bias", "compressor.ape"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.attn\.kv_proj\.", ".attn.wkv."),
    (r"\.o_([ab])_proj\.", r".wo_\1."),
    (r"\.mlp\.", ".ffn."),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"shared_experts\.gate_proj", "shared_experts.w1"),
    (r"shared_experts\.up_proj", "shared_experts.w3"),
    (r"shared_experts\.down_proj", "shared_experts.w2"),
)


def build_model() -> Any:
    """transformers' ``DeepseekV4ForCausalLM`` of the demo geometry with initial values for training (float32)."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(SEED)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**geometry.CONFIG))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _initialise(name, tensor)
        for index, layer in enumerate(model.model.layers):
            for hc in (layer.attn_hc, layer.ffn_hc):
                hc.base.copy_(_stream_bias(index))
    return model


def _initialise(name: str, tensor: Tensor) -> None:
    if name.endswith("tid2eid"):
        experts = geometry.CONFIG["n_routed_experts"]
        tensor.copy_(torch.rand(tensor.shape[0], experts).argsort(-1)[:, : tensor.shape[1]])
    elif name.endswith("embed_tokens.weight"):
        tensor.normal_(std=0.3)
    elif name.endswith("hc.fn") or name.endswith("hc_fn"):
        tensor.normal_(std=0.02)
    elif name.endswith("hc.scale") or name.endswith("hc_scale"):
        tensor.fill_(0.2)
    elif re.search(r"(o_b_proj\.weight|down_proj(\.weight)?)$", name):
        tensor.normal_(std=0.5 / math.sqrt(tensor.shape[-1]))
    elif name.endswith("lm_head.weight"):
        tensor.normal_(std=0.02)
    elif tensor.ndim >= 2 and "position_bias" not in name:
        tensor.normal_(std=0.8 / math.sqrt(tensor.shape[-1]))


def _stream_bias(index: int) -> Tensor:
    """mHC base: each layer reads and writes one stream a little more than the others; streams pass through."""
    favoured = torch.nn.functional.one_hot(torch.tensor(index % 4), 4).float()
    mixing = torch.eye(4).flatten() * 4 - 2
    return torch.cat((favoured - 0.5, 0.5 * favoured, mixing))


def to_training_dtypes(model: Any) -> None:
    """bfloat16 matrices; float32 for norms, mHC, sinks, positional biases and the router."""
    for name, parameter in model.named_parameters():
        if not _FP32.search(name):
            parameter.data = parameter.data.bfloat16()


def fake_quantized(name: str, weight: Tensor) -> Tensor:
    """``weight`` (float32) as the shipped file stores it, dequantised: NVFP4 experts, FP8 linears, BF16 floor, F32 rest."""
    if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
        return quantize(weight, QuantFormat.NVFP4).dequantize()
    if _FP8.search(name):
        return quantize(weight, QuantFormat.FP8_BLOCK128).dequantize()
    if re.search(r"(_hc\.|hc_head\.|sinks|position_bias|e_score)", name):
        return weight
    return weight.bfloat16().float()


def native_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A transformers state dict (fused experts) in native names, one tensor per expert projection."""
    native: dict[str, Tensor] = {}
    for name, tensor in state.items():
        new = name
        for pattern, replacement in _NATIVE:
            new = re.sub(pattern, replacement, new)
        if name.endswith("experts.gate_up_proj"):
            for expert, pair in enumerate(tensor):
                w1, w3 = pair.chunk(2)
                stem = new.removesuffix("gate_up_proj")
                native[f"{stem}{expert}.w1.weight"], native[f"{stem}{expert}.w3.weight"] = w1, w3
        elif name.endswith("experts.down_proj"):
            native |= {f"{new.removesuffix('down_proj')}{expert}.w2.weight": w2 for expert, w2 in enumerate(tensor)}
        else:
            native[new] = tensor
    return native


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
