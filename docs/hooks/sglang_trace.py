"""A trace of SGLang's DeepseekV4ForCausalLM, one file per tensor-parallel rank.

Put the three lines into a module of a package ``traced`` and start the server with
``SGLANG_EXTERNAL_MODEL_PACKAGE=traced`` and ``--disable-cuda-graph --disable-radix-cache``; one
request of one new token then writes the files, and the next request overwrites them:

    from sglang_trace import traced
    from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
    EntryClass = traced(DeepseekV4ForCausalLM, folder=MODEL, path="theirs.safetensors")

Written for python/sglang/srt/models/deepseek_v4.py of commit 000328a8, tensor parallelism without
data-parallel attention. Not in the files: key-value and compressed rows, attention per head, index
queries, keys, scores and entries, which exist only inside of kernels and of the backend.
"""

from pathlib import Path
from typing import Any

from sglang.srt.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from torch import Tensor, nn
from trace_writer import TraceWriter

# Logits are made here from each rank's part of the head; the rest is reduced before it returns.
JOIN = {"layers.*.attn.q": "concat:1", "logits": "concat:-1", "*": "equal"}


def traced(base: type[nn.Module], folder: str, path: str) -> type[nn.Module]:
    """The model class with hooks, by the name that the registry knows."""

    class DeepseekV4ForCausalLM(base):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            install(self, folder, path)

    return DeepseekV4ForCausalLM


def install(model: nn.Module, folder: str, path: str) -> None:
    """Hooks into a model; the file is written at the end of every forward pass."""
    rank = get_tensor_model_parallel_rank()
    ranks = get_tensor_model_parallel_world_size()
    writer = TraceWriter("sglang", folder, rank, ranks, JOIN)
    writer.check(path)
    layers = range(model.model.start_layer, model.model.end_layer)
    for index in layers:
        _hook_layer(model.model.layers[index], index, writer, index == layers[0])
    model.model.norm.register_forward_hook(
        lambda _norm, _arguments, hidden: _finish(model, hidden, writer, Path(path))
    )


def _hook_layer(layer: nn.Module, index: int, writer: TraceWriter, first: bool) -> None:
    def add(name: str, rows: Tensor) -> None:
        writer.add(f"layers.{index}.{name}", rows)

    def enter(_layer: nn.Module, _arguments: tuple, named: dict[str, Any]) -> None:
        writer.begin(named["input_ids"], named["positions"])

    def enter_attention(_attn: nn.Module, _arguments: tuple, named: dict[str, Any]) -> None:
        add("attn_hc.x", named["x"])

    def routed(_topk: nn.Module, _arguments: tuple, output: Any) -> None:
        # Where the top-k leaves the scale to the experts, their output is multiplied by it.
        fused = layer.mlp.experts.should_fuse_routed_scaling_factor_in_topk
        scale = 1.0 if fused else layer.mlp.routed_scaling_factor
        add("router.experts", output.topk_ids.long())
        add("router.weights", output.topk_weights.float() * scale)

    if first:
        layer.register_forward_pre_hook(enter, with_kwargs=True)
    _trace_seams(layer, add)
    layer.self_attn.register_forward_pre_hook(enter_attention, with_kwargs=True)
    _trace_result(layer.self_attn, "_compute_q_b", lambda q: add("attn.q", q))
    layer.self_attn.register_forward_hook(lambda _a, _arguments, out: add("attn.output", out))
    layer.mlp.register_forward_pre_hook(lambda _m, arguments: add("ffn_hc.x", arguments[0]))
    layer.mlp.topk.register_forward_hook(routed)
    layer.mlp.register_forward_hook(lambda _m, _arguments, out: add("ffn.output", out))
    layer.register_forward_hook(lambda _l, _arguments, out: add("streams", out))


def _trace_seams(layer: nn.Module, add: Any) -> None:
    """``hc_pre`` is called for either seam of a layer, with that seam's weights."""
    original = layer.hc_pre

    def hc_pre(x: Tensor, hc_fn: Tensor, *arguments: Any, **named: Any) -> tuple:
        result = original(x, hc_fn, *arguments, **named)
        seam = "attn_hc" if hc_fn is layer.hc_attn_fn else "ffn_hc"
        tokens, count = x.shape[:2]
        add(f"{seam}.streams", x)
        add(f"{seam}.post", result[1].reshape(tokens, count).float())
        add(f"{seam}.comb", result[2].reshape(tokens, count, count).float())
        return result

    layer.hc_pre = hc_pre


def _trace_result(module: nn.Module, method: str, see: Any) -> None:
    """``see`` gets what a method returns."""
    original = getattr(module, method)

    def traced_method(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        see(result)
        return result

    setattr(module, method, traced_method)


def _finish(model: nn.Module, hidden: Tensor, writer: TraceWriter, path: Path) -> None:
    """The model's own logits are of the last token only."""
    writer.add("hidden", hidden)
    writer.add("logits", (hidden @ model.lm_head.weight.T).float())
    if writer.whole:
        writer.save(path)
