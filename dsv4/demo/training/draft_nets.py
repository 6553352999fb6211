"""The demo's draft modules for training: blocks of transformers, which learn what the frozen base
says.
"""

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.demo import CHECKPOINT
from dsv4.demo.training import weights
from dsv4.demo.training.fast_attention import Options, Rope, quantize_rows, rotate
from dsv4.demo.training.fast_forward import Kernels, experts, mix_in, mix_out
from dsv4.demo.training.geometry import CONFIG, LAYERS
from dsv4.ops.norm import rms_norm
from dsv4.weights.parameters import MtpKind

BLOCK = 5
# As in the published vocabulary, where it is 128799: <｜place▁holder▁no▁799｜>.
NOISE = 2529
TARGETS = (3, 4, 5)
RANK = 32
WINDOW = CONFIG["sliding_window"]
PROMPT_WEIGHT = 0.05
# Later drafts count only where those before them are kept.
SLOT_DECAY = 0.8
CONFIDENCE_WEIGHT = 0.1
STAGES: dict[MtpKind, int] = {"classic": 1, "dspark": 3}
DSPARK_KEYS = {
    "compress_ratios": [*CONFIG["compress_ratios"], 0, 0],
    "dspark_block_size": BLOCK,
    "dspark_noise_token_id": NOISE,
    "dspark_target_layer_ids": list(TARGETS),
    "dspark_markov_rank": RANK,
}


class Base(NamedTuple):
    """What the frozen model computes of token ids ``[B, S]``: the streams ``[B, S, M, E]`` behind
    the last layers (``TARGETS``) and the logits ``[B, S, V]``.
    """

    taps: tuple[Tensor, ...]
    logits: Tensor


class Result(NamedTuple):
    """The loss; of every draft of a block in answers, how often it is the base's own choice where
    those before it are (float32 ``[N]``).
    """

    loss: Tensor
    accepted: Tensor


def frozen_base(device: str) -> Any:
    """The embedded checkpoint as transformers' model, dequantised."""
    model = weights.load_model(CHECKPOINT)
    if device != "cpu":
        weights.to_training_dtypes(model)
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def base_values(model: Any, ids: Tensor, ropes: dict[str, Rope], kernels: Kernels) -> Base:
    """The base with its selection and its quantised key rows."""
    streams = model.model.embed_tokens(ids).unsqueeze(2)
    streams = streams.expand(-1, -1, model.config.hc_mult, -1).contiguous()
    taps = []
    for index, layer in enumerate(model.model.layers):
        rope = ropes[layer.self_attn.rope_layer_type]
        options = Options(select=True)
        streams, _, _ = kernels.block(layer, streams, ids, rope, options, kernels.sinkhorn)
        if index in TARGETS:
            taps.append(streams)
    hidden = model.model.norm(model.model.hc_head(streams))
    return Base(tuple(taps), model.lm_head(hidden).float())


class DraftNet(torch.nn.Module):
    """The blocks, as layers of ``core``, with its collapse and norm as those of the last one."""

    def __init__(self, base: Any, kind: MtpKind) -> None:
        from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

        super().__init__()
        stages = STAGES[kind]
        own = {
            "num_hidden_layers": stages,
            "compress_ratios": [0] * (stages + 1),
            "num_hash_layers": 0,
            "vocab_size": 8,
        }
        self.core: Any = DeepseekV4ForCausalLM(DeepseekV4Config(**{**copy.deepcopy(CONFIG), **own}))
        with torch.no_grad():
            for stage, layer in enumerate(self.core.model.layers):
                # The last layers of the base are nearer to a draft than random values are.
                source = base.model.layers[LAYERS - stages + stage].state_dict()
                target = layer.state_dict()
                layer.load_state_dict({name: source[name].float() for name in target})
            self.core.model.hc_head.load_state_dict(
                {name: value.float() for name, value in base.model.hc_head.state_dict().items()}
            )
            self.core.model.norm.weight.copy_(base.model.norm.weight)
        for parameter in (self.core.lm_head.weight, self.core.model.embed_tokens.weight):
            parameter.requires_grad_(False)
        self.eps = self.core.config.rms_norm_eps

    def collapsed(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """The collapsed streams and their norm."""
        z = self.core.model.hc_head(streams)
        return z, self.core.model.norm(z)


class ClassicNet(DraftNet):
    """Row t reads the streams of position t and token t + 1."""

    def __init__(self, base: Any) -> None:
        super().__init__(base, "classic")
        width = CONFIG["hidden_size"]
        self.e_proj = torch.nn.Parameter(0.8 / width**0.5 * torch.randn(width, width))
        self.h_proj = torch.nn.Parameter(torch.eye(width))
        self.enorm = torch.nn.Parameter(torch.ones(width))
        self.hnorm = torch.nn.Parameter(torch.ones(width))

    def forward(
        self, base: Any, seen: Base, batch: Tensor, ropes: dict[str, Rope], kernels: Kernels
    ) -> Result:
        """``batch``: int64 ``[2, B, S + 1]``, token ids and marks of answers."""
        ids, marks = batch
        streams = seen.taps[-1]
        e = rms_norm(base.model.embed_tokens(ids[:, 1:]), self.enorm, self.eps)
        y = product(e, self.e_proj)
        y = torch.cat((torch.zeros_like(y[:, :1]), y[:, 1:]), 1)
        z = y.unsqueeze(2) + product(rms_norm(streams, self.hnorm, self.eps), self.h_proj)
        layer = self.core.model.layers[0]
        rope = ropes[layer.self_attn.rope_layer_type]
        z, _, _ = kernels.block(layer, z, ids[:, 1:], rope, Options(), kernels.sinkhorn)
        logits = base.lm_head(self.collapsed(z)[1]).float()
        importance = PROMPT_WEIGHT + (1 - PROMPT_WEIGHT) * marks[:, 2:].float()
        loss, same = compared(logits[:, :-1], seen.logits[:, 1:], importance)
        answers = marks[:, 2:].bool()
        return Result(loss, same[answers].float().mean()[None])


class DSparkNet(DraftNet):
    """A block behind an anchor token reads the main model's streams before it."""

    def __init__(self, base: Any) -> None:
        super().__init__(base, "dspark")
        width = CONFIG["hidden_size"]
        start = torch.eye(width).repeat(1, len(TARGETS)) / len(TARGETS)
        self.main_proj = torch.nn.Parameter(start)
        self.main_norm = torch.nn.Parameter(torch.ones(width))
        vocabulary = CONFIG["vocab_size"]
        self.markov_w1 = torch.nn.Parameter(0.3 * torch.randn(vocabulary, RANK))
        self.markov_w2 = torch.nn.Parameter(0.02 * torch.randn(vocabulary, RANK))
        self.confidence = torch.nn.Parameter(torch.zeros(1, width + RANK))

    def forward(
        self, base: Any, seen: Base, batch: Tensor, ropes: dict[str, Rope], kernels: Kernels
    ) -> Result:
        """See ``ClassicNet``; anchors are drawn, in answers mostly."""
        ids, marks = batch
        rows, length = seen.logits.shape[:2]
        chance = PROMPT_WEIGHT + (1 - PROMPT_WEIGHT) * marks[:, 2 : length - BLOCK + 2].float()
        anchors = 1 + torch.multinomial(chance, min(32, chance.shape[1] // 2))
        row = torch.arange(rows, device=ids.device)[:, None].expand_as(anchors).flatten()
        anchor = anchors.flatten()
        slots = anchor[:, None] + torch.arange(BLOCK, device=ids.device)
        streams = self._streams(base, seen, (ids, row, anchor, slots), ropes, kernels)
        z, hidden = self.collapsed(streams)
        before = self.markov_w1[ids[row[:, None], slots]].float()
        logits = base.lm_head(hidden).float() + product(before, self.markov_w2)
        wanted = seen.logits[row[:, None], slots]
        answers = marks[row[:, None], slots + 1].bool()
        importance = PROMPT_WEIGHT + (1 - PROMPT_WEIGHT) * answers.float()
        decay = SLOT_DECAY ** torch.arange(BLOCK, device=ids.device)
        loss, same = compared(logits, wanted, importance * decay)
        joined = torch.cat((z.detach().float(), before.detach()), -1)
        raw = product(joined, self.confidence).squeeze(-1)
        loss = loss + CONFIDENCE_WEIGHT * F.binary_cross_entropy_with_logits(raw, same.float())
        kept = same.cumprod(1)[answers.all(1)]
        return Result(loss, kept.float().mean(0))

    def _streams(
        self,
        base: Any,
        seen: Base,
        place: tuple[Tensor, ...],
        ropes: dict[str, Rope],
        kernels: Kernels,
    ) -> Tensor:
        """The streams ``[N, BLOCK, M, E]`` behind the last stage."""
        ids, row, anchor, slots = place
        means = torch.cat([tap.mean(2) for tap in seen.taps], -1)
        main_x = rms_norm(product(means, self.main_proj), self.main_norm, self.eps)
        tokens = ids[row[:, None], slots].clone()
        tokens[:, 1:] = NOISE
        streams = base.model.embed_tokens(tokens).unsqueeze(2)
        streams = streams.expand(-1, -1, base.config.hc_mult, -1).contiguous()
        back = anchor[:, None] - torch.arange(WINDOW, 0, -1, device=ids.device)
        for layer in self.core.model.layers:
            cos, sin = ropes[layer.self_attn.rope_layer_type]
            kv = rotate(layer.self_attn.kv_norm(layer.self_attn.kv_proj(main_x)), cos, sin)
            # An index of one dimension has a gradient without sorting.
            flat = (row[:, None] * kv.shape[1] + back.clamp(min=0)).flatten()
            keys = quantize_rows(kv).flatten(0, 1).index_select(0, flat)
            keys = keys.view(len(row), WINDOW, -1)
            own = (cos[0][slots], sin[0][slots])
            streams = stage(layer, streams, own, (keys, back >= 0), kernels)
        return streams


def stage(
    layer: Any,
    streams: Tensor,
    rope: Rope,
    before: tuple[Tensor, Tensor],
    kernels: Kernels,
) -> Tensor:
    """One block on streams ``[N, BLOCK, M, E]``; ``before``: keys ``[N, W, D]`` of the window and
    which of them there are.
    """
    post, comb, x = mix_in(layer.attn_hc, streams, kernels.sinkhorn)
    y = block_attention(layer.self_attn, layer.input_layernorm(x), rope, before)
    streams = mix_out(streams, y, post, comb)
    post, comb, x = mix_in(layer.ffn_hc, streams, kernels.sinkhorn)
    y, _ = experts(layer.mlp, layer.post_attention_layernorm(x), streams.new_zeros(()).long())
    return mix_out(streams, y, post, comb)


def block_attention(attn: Any, x: Tensor, rope: Rope, before: tuple[Tensor, Tensor]) -> Tensor:
    """Attention of every token of a block to the window and to all of the block
    (model.md#dspark): ``[N, BLOCK, E]``.
    """
    cos, sin = rope
    heads = (cos.unsqueeze(2), sin.unsqueeze(2))
    c_q = attn.q_a_norm(attn.q_a_proj(x))
    q = attn.q_b_proj(c_q).unflatten(-1, (attn.num_heads, attn.head_dim))
    q = rotate(attn.q_b_norm(q), *heads)
    own = quantize_rows(rotate(attn.kv_norm(attn.kv_proj(x)), cos, sin))
    keys = torch.cat((before[0], own), 1)
    scores = torch.einsum("nbhd,nkd->nbhk", q, keys).float() * attn.scaling
    there = F.pad(before[1], (0, own.shape[1]), value=True)
    scores = scores.masked_fill(~there[:, None, None], float("-inf"))
    sinks = attn.sinks.float().view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
    weight = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].to(q.dtype)
    out = rotate(torch.einsum("nbhk,nkd->nbhd", weight, keys), heads[0], -heads[1])
    groups = out.reshape(*x.shape[:2], attn.config.o_groups, -1)
    return attn.o_b_proj(attn.o_a_proj(groups).flatten(2))


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x · Wᵀ in the dtype of x."""
    return F.linear(x, weight.to(x.dtype))


def compared(logits: Tensor, wanted: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy with the base's distribution, weighted, and where both choose the same."""
    losses = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    same = logits.detach().argmax(-1) == wanted.argmax(-1)
    return (losses * importance).sum() / importance.sum(), same
