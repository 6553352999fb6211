"""A block and the DSpark module as plain formulas in float64, for one prefix at a time: nothing is
cached, every key is computed anew.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.layers.weights import Weights
from dsv4.weights.quant import QuantTensor

Values = Mapping[str, Tensor]


def float64_values(weights: Weights) -> dict[str, Tensor]:
    """What the weights mean."""
    return {
        name: (weight.dequantize() if isinstance(weight, QuantTensor) else weight).double()
        for name, weight in weights.items()
        if isinstance(weight, QuantTensor | Tensor)
    }


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Over the last dimension."""
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def rotated(x: Tensor, positions: list[int], config: ModelConfig, sign: float = 1.0) -> Tensor:
    """The last dimensions of ``[T, ..., D]`` as complex pairs, turned by position · θ^(−2i / R)."""
    width = config.qk_rope_head_dim
    pairs = torch.view_as_complex(x[..., -width:].unflatten(-1, (-1, 2)).contiguous())
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] * config.rope_theta**-exponents
    turn = torch.polar(torch.ones_like(angle), sign * angle)
    turn = turn.view(len(positions), *[1] * (x.dim() - 2), -1)
    return torch.cat((x[..., :-width], torch.view_as_real(pairs * turn).flatten(-2)), -1)


class Seam(NamedTuple):
    """Collapsed input of a sublayer, and how its result goes back."""

    u: Tensor
    post: Tensor
    comb: Tensor


def seam(streams: Tensor, values: Values, prefix: str, config: ModelConfig) -> Seam:
    """The mix of one token's streams ``[M, E]``, number by number."""
    count = streams.shape[0]
    flat = streams.flatten()
    scale = values[f"{prefix}_scale"]
    mixes = values[f"{prefix}_fn"] @ flat / (flat.square().mean() + config.rms_norm_eps).sqrt()
    base = values[f"{prefix}_base"]
    pre = torch.sigmoid(mixes[:count] * scale[0] + base[:count]) + config.hc_eps
    post = 2 * torch.sigmoid(mixes[count : 2 * count] * scale[1] + base[count : 2 * count])
    comb = (mixes[2 * count :] * scale[2] + base[2 * count :]).view(count, count).softmax(1)
    comb = comb + config.hc_eps
    comb = comb / (comb.sum(0, keepdim=True) + config.hc_eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(1, keepdim=True) + config.hc_eps)
        comb = comb / (comb.sum(0, keepdim=True) + config.hc_eps)
    return Seam(pre @ streams, post, comb)


def back(streams: Tensor, y: Tensor, mix: Seam) -> Tensor:
    """The streams behind a sublayer with the result ``y``."""
    return mix.post[:, None] * y + mix.comb.T @ streams


def key_rows(x: Tensor, positions: list[int], values: Values, config: ModelConfig) -> Tensor:
    """Keys ``[T, D]`` of attention inputs ``[T, E]``."""
    kv = x @ values["attn.wkv.weight"].T
    return rotated(
        rms_norm(kv, values["attn.kv_norm.weight"], config.rms_norm_eps), positions, config
    )


def attention(
    x: Tensor, positions: list[int], seen: list[Tensor], values: Values, config: ModelConfig
) -> Tensor:
    """The sublayer's result for inputs ``[T, E]``; ``seen[t]``: the keys that token t sees."""
    eps = config.rms_norm_eps
    low = rms_norm(x @ values["attn.wq_a.weight"].T, values["attn.q_norm.weight"], eps)
    q = (low @ values["attn.wq_b.weight"].T).unflatten(1, (-1, config.head_dim))
    q = rotated(rms_norm(q, None, eps), positions, config)
    sink = values["attn.attn_sink"]
    heads = []
    for q_HD, keys in zip(q, seen, strict=True):
        scores = torch.cat((q_HD @ keys.T / config.head_dim**0.5, sink[:, None]), 1)
        heads.append(scores.softmax(1)[:, :-1] @ keys)
    out = rotated(torch.stack(heads), positions, config, sign=-1.0)
    groups = out.flatten(1).unflatten(1, (config.o_groups, -1))
    low_rank = values["attn.wo_a.weight"].unflatten(0, (config.o_groups, -1))
    mixed = torch.einsum("tgk,grk->tgr", groups, low_rank).flatten(1)
    return mixed @ values["attn.wo_b.weight"].T


def experts(x: Tensor, values: Values, config: ModelConfig) -> Tensor:
    """The sublayer's result for one input ``[E]``."""

    def expert(name: str, number: int | None = None) -> Tensor:
        w1, w2, w3 = (values[f"ffn.{name}.{part}.weight"] for part in ("w1", "w2", "w3"))
        if number is not None:
            w1, w2, w3 = w1[number], w2[number], w3[number]
        limit = config.swiglu_limit
        gate = (w1 @ x).clamp(max=limit)
        return w2 @ (gate * torch.sigmoid(gate) * (w3 @ x).clamp(-limit, limit))

    affinity = torch.nn.functional.softplus(values["ffn.gate.weight"] @ x).sqrt()
    chosen = (affinity + values["ffn.gate.bias"]).topk(config.num_experts_per_tok).indices
    total = affinity[chosen].sum()
    routed = [affinity[i] / total * expert("experts", int(i)) for i in chosen]
    return config.routed_scaling_factor * torch.stack(routed).sum(0) + expert("shared_experts")


def entered(streams: Tensor, values: Values, config: ModelConfig) -> tuple[Tensor, list[Seam]]:
    """Attention inputs ``[T, E]`` of streams ``[T, M, E]``, and the seams."""
    seams = [seam(token, values, "hc_attn", config) for token in streams]
    u = torch.stack([one.u for one in seams])
    return rms_norm(u, values["attn_norm.weight"], config.rms_norm_eps), seams


def block_behind(
    streams: Tensor, y: Tensor, seams: list[Seam], values: Values, config: ModelConfig
) -> Tensor:
    """The streams behind a block whose attention gives ``y`` ``[T, E]``."""
    behind = []
    for token, y_E, mix in zip(streams, y, seams, strict=True):
        middle = back(token, y_E, mix)
        mix_ffn = seam(middle, values, "hc_ffn", config)
        x = rms_norm(mix_ffn.u, values["ffn_norm.weight"], config.rms_norm_eps)
        behind.append(back(middle, experts(x, values, config), mix_ffn))
    return torch.stack(behind)


def collapsed(streams: Tensor, values: Values, config: ModelConfig) -> Tensor:
    """``[T, E]`` before the last norm."""
    rows = []
    for token in streams:
        flat = token.flatten()
        mixes = values["hc_head_fn"] @ flat / (flat.square().mean() + config.rms_norm_eps).sqrt()
        pre = torch.sigmoid(mixes * values["hc_head_scale"] + values["hc_head_base"])
        rows.append((pre + config.hc_eps) @ token)
    return torch.stack(rows)


def below(values: Values, prefix: str) -> dict[str, Tensor]:
    """The values under a prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }


class DSparkFormula:
    """``block``: collapsed rows ``[B, E]`` and logits ``[B, V]`` of a block, without the Markov
    head.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        assert config.dspark is not None
        self.config = config
        self.keys = config.dspark
        self.values = float64_values(weights)
        self.stages = len(config.dspark.target_layer_ids)
        self.last = below(self.values, f"mtp.{self.stages - 1}.")

    def block(self, taps: list[Tensor], anchor: int) -> tuple[Tensor, Tensor]:
        """``taps``: float64 streams ``[S, M, E]`` of all S tokens before the anchor."""
        config = self.config
        start = taps[0].shape[0]
        before = list(range(max(0, start - config.sliding_window), start))
        means = torch.cat([tap[before].mean(1) for tap in taps], 1)
        first = below(self.values, "mtp.0.")
        main_x = means @ first["main_proj.weight"].T
        main_x = rms_norm(main_x, first["main_norm.weight"], config.rms_norm_eps)
        ids = [anchor] + [self.keys.noise_token_id] * (self.keys.block_size - 1)
        positions = list(range(start, start + len(ids)))
        streams = self.values["embed.weight"][ids][:, None].repeat(1, config.hc_mult, 1)
        for stage in range(self.stages):
            values = below(self.values, f"mtp.{stage}.")
            x, seams = entered(streams, values, config)
            keys = torch.cat(
                (key_rows(main_x, before, values, config), key_rows(x, positions, values, config))
            )
            y = attention(x, positions, [keys] * len(ids), values, config)
            streams = block_behind(streams, y, seams, values, config)
        z = collapsed(streams, self.last, config)
        hidden = rms_norm(z, self.last["norm.weight"], config.rms_norm_eps)
        return z, hidden @ self.values["head.weight"].T

    def markov(self, z: Tensor, base: Tensor, previous: int) -> tuple[Tensor, float]:
        """Logits ``[V]`` and confidence of one slot behind the token ``previous``."""
        row = self.last["markov_head.markov_w1.weight"][previous]
        logits = base + self.last["markov_head.markov_w2.weight"] @ row
        raw = self.last["confidence_head.proj.weight"][0] @ torch.cat((z, row))
        return logits, float(torch.sigmoid(raw))
