"""Attention of the fast training forward: window blocks, compressed entries and the indexer."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW = 128
Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Options:
    """``quantize_rows``: fp8 key rows as the engine stores them; ``select``: top-k on;
    ``index_loss``: KL of the indexer.
    """

    quantize_rows: bool = True
    select: bool = False
    index_loss: bool = False


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved RoPE on the last ``2 · cos.shape[-1]`` dims; cos and sin broadcast against
    ``x[..., : cos.shape[-1]]``.
    """
    width = 2 * cos.shape[-1]
    nope = x[..., :-width]
    turned = x[..., -width:].float().unflatten(-1, (-1, 2))
    a = turned[..., 0]
    b = turned[..., 1]
    pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((nope, pairs.flatten(-2).to(x.dtype)), dim=-1)


def quantize_rows(rows: Tensor) -> Tensor:
    """Key rows ``[..., 512]`` after the round trip of model.md#cache-rows, straight-through
    gradient.
    """
    nope = rows[..., :448].float().unflatten(-1, (7, 64))
    amax = nope.detach().abs().amax(-1, keepdim=True).clamp(min=1e-4)
    block_scale = torch.exp2(torch.ceil(torch.log2(amax * (1 / 448))))
    stored = (nope.detach() / block_scale).clamp(-448, 448).to(
        torch.float8_e4m3fn
    ).float() * block_scale
    nope = nope + (stored - nope).detach()
    return torch.cat((nope.flatten(-2).to(rows.dtype), rows[..., 448:]), dim=-1)


def pool(compressor: Any, x: Tensor, rope: Rope, overlap: bool) -> Tensor:
    """Compressed entries ``[B, C, d]`` of either compressor (model.md#compressor), normalised and
    rotated.
    """
    ratio = compressor.compress_rate
    width = compressor.head_dim
    count = x.shape[1] // ratio
    values = compressor.kv_proj(x)[:, : count * ratio].unflatten(1, (count, ratio))
    gates = (
        compressor.gate_proj(x)[:, : count * ratio].unflatten(1, (count, ratio))
        + compressor.position_bias
    )
    if overlap:
        values = torch.cat(
            (F.pad(values[:, :-1, :, :width], (0, 0, 0, 0, 1, 0)), values[..., width:]), dim=2
        )
        previous = F.pad(gates[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=float("-inf"))
        gates = torch.cat((previous, gates[..., width:]), dim=2)
    pooled = (values.float() * gates.float().softmax(2)).sum(2).to(x.dtype)
    cos, sin = (table[:, : count * ratio : ratio] for table in rope)
    return rotate(compressor.kv_norm(pooled), cos, sin)


def index_scores(indexer: Any, x: Tensor, c_q: Tensor, rope: Rope) -> Tensor:
    """Lightning indexer scores ``[B, S, C]``, unmasked (model.md#indexer)."""
    keys = pool(indexer, x, rope, overlap=True)
    q = indexer.q_b_proj(c_q).unflatten(-1, (-1, indexer.head_dim))
    q = rotate(q, rope[0].unsqueeze(2), rope[1].unsqueeze(2))
    products = (q.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, (x.shape[1], -1))
    scorer = indexer.scorer
    weights = scorer.weights_proj(x).float() * (scorer.softmax_scale * scorer.weights_scaling)
    return (F.relu(products).float() * weights.unsqueeze(-1)).sum(2)


def attention(attn: Any, x: Tensor, rope: Rope, options: Options) -> tuple[Tensor, Tensor]:
    """Window and compressed entries (model.md#attention): output ``[B, S, E]`` and the indexer loss
    (0-d).
    """
    cos = rope[0].unsqueeze(2)
    sin = rope[1].unsqueeze(2)
    c_q = attn.q_a_norm(attn.q_a_proj(x))
    q = rotate(
        attn.q_b_norm(attn.q_b_proj(c_q).unflatten(-1, (attn.num_heads, attn.head_dim))), cos, sin
    )
    kv = rotate(attn.kv_norm(attn.kv_proj(x)), *rope)
    kv = quantize_rows(kv) if options.quantize_rows else kv
    entries, allowed, scores = compressed_keys(attn, x, c_q, rope, options)
    probabilities, windows = joint_softmax(attn, q, kv, entries, allowed)
    batch, length, heads, _ = q.shape
    near = probabilities[..., : 2 * WINDOW].reshape(
        batch, length // WINDOW, WINDOW * heads, 2 * WINDOW
    )
    out = (near @ windows).view(batch, length, heads, -1)
    loss = x.new_zeros((), dtype=torch.float32)
    if entries is not None:
        far = probabilities[..., 2 * WINDOW :]
        out = out + (far.reshape(batch, length * heads, -1) @ entries).view_as(out)
        if scores is not None and options.index_loss:
            loss = indexer_loss(far, scores, allowed)
    out = rotate(out, cos, -sin)
    grouped = attn.o_a_proj(out.reshape(batch, length, attn.config.o_groups, -1)).flatten(2)
    return attn.o_b_proj(grouped), loss


def compressed_keys(
    attn: Any, x: Tensor, c_q: Tensor, rope: Rope, options: Options
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Entries ``[B, C, 512]``, which of them each query may see ``[1 or B, S, C]``, and CSA's
    indexer scores if wanted.
    """
    compressor = attn.compressor
    if compressor is None:
        return None, None, None
    csa = attn.layer_type == "compressed_sparse_attention"
    entries = pool(compressor, x, rope, overlap=csa)
    entries = quantize_rows(entries) if options.quantize_rows else entries
    positions = torch.arange(x.shape[1], device=x.device)
    ready = (positions + 1) // compressor.compress_rate
    allowed = (torch.arange(entries.shape[1], device=x.device) < ready.unsqueeze(-1)).unsqueeze(0)
    if not csa or not (options.select or options.index_loss):
        return entries, allowed, None
    # The indexer learns from its own loss only: nothing flows back into the model through it.
    scores = index_scores(compressor.indexer, x.detach(), c_q.detach(), rope)
    scores = scores.masked_fill(~allowed, float("-inf"))
    top_k = compressor.indexer.index_topk
    if options.select and entries.shape[1] > top_k:
        threshold = scores.detach().topk(top_k, dim=-1).values[..., -1:]
        allowed = allowed & (scores.detach() >= threshold)
    return entries, allowed, scores


def joint_softmax(
    attn: Any, q: Tensor, kv: Tensor, entries: Tensor | None, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Probabilities ``[B, S, H, 256 + C]`` over two window blocks and the entries, and the window
    keys per block.
    """
    batch, length, heads, width = q.shape
    blocks = length // WINDOW
    current = kv.view(batch, blocks, WINDOW, width)
    previous = F.pad(kv, (0, 0, WINDOW, 0))[:, :length].view(batch, blocks, WINDOW, width)
    windows = torch.cat((previous, current), dim=2)
    scores = q.reshape(batch, blocks, WINDOW * heads, width) @ windows.transpose(2, 3)
    scores = scores.view(batch, length, heads, 2 * WINDOW).float() * attn.scaling
    positions = torch.arange(length, device=q.device)
    key = torch.arange(2 * WINDOW, device=q.device)
    row = (positions % WINDOW).unsqueeze(-1)
    seen = (
        (key > row)
        & (key <= row + WINDOW)
        & (key + (positions // WINDOW * WINDOW).unsqueeze(-1) >= WINDOW)
    )
    scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
    if entries is not None and allowed is not None:
        far = (q.reshape(batch, length * heads, width) @ entries.transpose(1, 2)).view(
            batch, length, heads, -1
        )
        far = (far.float() * attn.scaling).masked_fill(~allowed.unsqueeze(2), float("-inf"))
        scores = torch.cat((scores, far), dim=-1)
    sinks = attn.sinks.float().view(1, 1, heads, 1)
    top = torch.maximum(scores.detach().amax(-1, keepdim=True), sinks.detach())
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True) + torch.exp(sinks - top)
    return (weights / total).to(q.dtype), windows


def indexer_loss(far: Tensor, scores: Tensor, allowed: Tensor | None) -> Tensor:
    """KL from the head-summed attention over the allowed entries to the indexer's softmax, weighted
    by that attention.
    """
    assert allowed is not None
    target = far.detach().float().sum(2)
    mass = target.sum(-1)
    target = target / mass.clamp(min=1e-6).unsqueeze(-1)
    log_predicted = scores.masked_fill(~allowed, -1e4).log_softmax(-1)
    divergence = (target * (target.clamp(min=1e-9).log() - log_predicted)).sum(-1)
    return (divergence * mass).sum() / mass.sum().clamp(min=1e-6)
