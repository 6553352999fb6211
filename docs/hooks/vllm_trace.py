"""A trace of vLLM's DeepseekV4ForCausalLM, one file per tensor-parallel rank.

    llm = LLM(MODEL, tensor_parallel_size=2, enforce_eager=True, enable_prefix_caching=False)
    llm.apply_model(partial(vllm_trace.install, folder=MODEL, path="theirs.safetensors"))
    llm.generate(TokensPrompt(prompt_token_ids=ids), SamplingParams(max_tokens=1))

``VLLM_ALLOW_INSECURE_SERIALIZATION=1`` lets ``apply_model`` send a function to the workers, which
must find this file and trace_writer.py (PYTHONPATH). Graphs and compilation would go around the
hooks, so eager it is. Every sequence overwrites the files of the one before.

Written for vllm/models/deepseek_v4/nvidia/model.py of commit 0101ca23 and attention.py beside it of
commit 0484480b. Not in the files: ``attn_hc.post`` and ``.comb``, the compressed rows, index
queries, keys and scores, which exist only inside of kernels. ``attn.kv`` is the row before the
cache rounds it to FP8.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trace_writer import TraceWriter
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

# What reduces or gathers before it returns is whole on every rank; logits may be on the first only.
JOIN = {"layers.*.attn.q": "concat:1", "layers.*.attn.heads": "concat:1", "*": "equal"}


def install(model: nn.Module, folder: str, path: str) -> None:
    """Hooks into a loaded model; the file is written at the end of every forward pass."""
    rank = get_tensor_model_parallel_rank()
    ranks = get_tensor_model_parallel_world_size()
    writer = TraceWriter("vllm", folder, rank, ranks, JOIN)
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

    def enter(_layer: nn.Module, arguments: tuple) -> None:
        streams, positions, input_ids = arguments[:3]
        writer.begin(input_ids, positions)
        add("attn_hc.streams", streams)

    def leave(_layer: nn.Module, _arguments: tuple, output: tuple) -> None:
        result, streams, post, comb = output
        tokens, count = streams.shape[:2]
        add("ffn_hc.streams", streams)
        add("ffn_hc.post", post.reshape(tokens, count))
        add("ffn_hc.comb", comb.reshape(tokens, count, count))
        # The residual mix is the next layer's first launch; vLLM's own function does it here too.
        mix = sys.modules[type(layer).__module__].mhc_post_tilelang
        add("streams", mix(result, streams, post, comb))

    if first:
        layer.register_forward_pre_hook(enter)
    layer.attn.register_forward_pre_hook(lambda _attn, arguments: add("attn_hc.x", arguments[1]))
    layer.attn.forward_mqa = _traced_attention(layer.attn, layer.attn.forward_mqa, add)
    if layer.attn.indexer is not None:
        layer.attn.indexer.weights_proj.register_forward_hook(
            lambda _projection, _arguments, output: add("indexer.weights", output[0].float())
        )
    layer.attn.register_forward_hook(lambda _attn, _arguments, out: add("attn.output", out))
    layer.ffn.register_forward_pre_hook(lambda _ffn, arguments: add("ffn_hc.x", arguments[0]))
    _hook_router(layer.ffn, add)
    layer.ffn.register_forward_hook(lambda _ffn, _arguments, out: add("ffn.output", out))
    layer.register_forward_hook(leave)


def _traced_attention(
    attn: nn.Module, original: Callable[..., None], add: Callable[[str, Tensor], None]
) -> Callable[..., None]:
    """``forward_mqa`` writes into ``output``, with heads padded, before the inverse RoPE."""

    def forward_mqa(q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        original(q, kv, positions, output)
        heads = slice(attn.n_local_heads)
        cos_sin = attn.rotary_emb.cos_sin_cache[positions].float()
        add("attn.q", q[:, heads].to(output.dtype))
        add("attn.kv", rotate(kv.unsqueeze(1), cos_sin, 1.0).squeeze(1))
        if attn.indexer is not None:
            add("indexer.entries", attn.topk_indices_buffer[: len(positions)].long())
        add("attn.heads", rotate(output[:, heads], cos_sin, -1.0))

    return forward_mqa


def _hook_router(ffn: nn.Module, add: Callable[[str, Tensor], None]) -> None:
    def routed(weights: Tensor, experts: Tensor) -> None:
        add("router.experts", experts.long())
        add("router.weights", weights.float())

    if ffn.use_mega_moe:
        ffn.experts.register_forward_pre_hook(lambda _experts, arguments: routed(*arguments[1:3]))
        return
    select = ffn.experts.router.select_experts

    def select_experts(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        weights, experts = select(*arguments, **named)
        routed(weights, experts)
        return weights, experts

    ffn.experts.router.select_experts = select_experts


def _finish(model: nn.Module, hidden: Tensor, writer: TraceWriter, path: Path) -> None:
    """Every rank takes part in the gathering of logits; some get none."""
    writer.add("hidden", hidden)
    logits = model.compute_logits(hidden)
    if logits is not None:
        writer.add("logits", logits.float())
    if writer.whole:
        writer.save(path)


def rotate(x: Tensor, cos_sin: Tensor, sign: float) -> Tensor:
    """RoPE of the last columns of x ``[T, H, D]``, in pairs of neighbours; −1 takes it back."""
    cos, sin = (half.unsqueeze(1) for half in cos_sin.chunk(2, -1))
    width = cos_sin.shape[-1]
    even, odd = x[..., -width:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - sign * odd * sin, odd * cos + sign * even * sin), -1)
    return torch.cat((x[..., :-width], turned.flatten(-2).to(x.dtype)), -1)
