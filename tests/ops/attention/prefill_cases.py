"""Calls of prefill attention on a GPU, and the comparison with float32."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.caches.rows import RowCache, RowFormat
from dsv4.ops import TORCH
from dsv4.ops.attention.prefill import sparse_attention, sparse_attention_portable
from dsv4.ops.immediate import immediately
from tests.ops.cases import WINDOW, inv_freq
from tests.ops.gpu import (
    poison,
    relative_error,
)

# Norm of the error over the norm of the float32 result. Two roundings to bfloat16 (result,
# rotation) and the weights' give 2.5e-3 together.
BOUND = 5e-3
# That of the GPU, and the one that every GPU has.
LAUNCHERS = {"wgmma": sparse_attention, "mma": sparse_attention_portable}


@dataclass(frozen=True)
class Case:
    """Arguments of one call."""

    q_THD: Tensor
    keys: KeySet
    selected_TK: Tensor | None
    sink_H: Tensor
    positions_T: Tensor
    inv_freq: Tensor

    def arguments(self) -> tuple[Tensor, KeySet, Tensor | None, Tensor, Tensor, Tensor]:
        return self.q_THD, self.keys, self.selected_TK, self.sink_H, self.positions_T, self.inv_freq

    def reference(self) -> Tensor:
        """float32, from the same bfloat16 queries."""
        return TORCH.sparse_attention(self.q_THD.float(), *self.arguments()[1:])


@dataclass(frozen=True)
class Rows:
    """The caches of a case: how a row is stored, how many keys a token sees, how long the ring is
    beyond what it must hold.
    """

    format: RowFormat = RowFormat.KV_FP8
    width: int = 512
    rope_width: int = 64
    window: int = WINDOW
    spare_slots: int = 8


PUBLISHED = Rows()


def unseen_are_nan(slots: int, seen: Tensor, rows: Rows) -> RowCache:
    """Random rows in the slots ``seen``, bytes 0xFF (NaN in every format) in the others."""
    cache = RowCache.allocate(
        slots, rows.width, rows.rope_width, rows.format, torch.bfloat16, torch.device("cuda")
    )
    cache.data.view(torch.uint8).fill_(0xFF)
    if cache.block_scale is not None:
        cache.block_scale.fill_(0xFF)
    # Group sizes of different magnitude, so that a wrong block scale shows.
    magnitude = torch.linspace(-2, 2, rows.width, device="cuda").exp2()
    cache.write(seen, torch.randn(len(seen), rows.width, device="cuda") * magnitude)
    return cache


def selection(positions_T: Tensor, ratio: int, listed: int) -> Tensor:
    """Distinct complete entries in random order; −1 at random places where there are fewer."""
    count = int(positions_T[-1] + 1) // ratio
    score = torch.rand(len(positions_T), max(count, listed), device="cuda")
    entry = torch.arange(score.shape[1], device="cuda")
    score[entry >= ((positions_T + 1) // ratio)[:, None]] = -1.0
    best, index = score.topk(listed, dim=1)
    index = torch.where(best < 0, -1, index)
    return torch.take_along_dim(
        index, torch.rand(index.shape, device="cuda").argsort(1), dim=1
    ).contiguous()


def make_case(
    tokens: int,
    heads: int,
    ratio: int,
    listed: int,
    start: int,
    rows: Rows = PUBLISHED,
) -> Case:
    torch.manual_seed(tokens * 7919 + heads * 31 + start)
    positions_T = start + torch.arange(tokens, device="cuda")
    slots = rows.window + tokens + rows.spare_slots
    seen = torch.arange(max(0, start - rows.window + 1), start + tokens, device="cuda") % slots
    ring = unseen_are_nan(slots, seen, rows)
    compressed = None
    selected_TK = None
    if ratio:
        count = (start + tokens) // ratio
        compressed = unseen_are_nan(count + 5, torch.arange(count, device="cuda"), rows)
        if listed:
            selected_TK = selection(positions_T, ratio, listed)
    frequencies = inv_freq(ratio).cuda()[:: 32 // (rows.rope_width // 2)].contiguous()
    q_THD = torch.randn(tokens, heads, rows.width, device="cuda").bfloat16()
    keys = KeySet(ring, compressed, ratio, rows.window)
    return Case(
        q_THD, keys, selected_TK, torch.randn(heads, device="cuda") * 2, positions_T, frequencies
    )


def check(case: Case, kernel: str = "wgmma") -> None:
    poison(64 << 20)
    out = immediately(LAUNCHERS[kernel])(*case.arguments())
    exact = case.reference()
    assert out.dtype == torch.bfloat16
    assert out.shape == exact.shape
    assert not bool(exact.isnan().any())
    error = relative_error(out, exact)
    worst = (out.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    where = divmod(int(worst.nan_to_num(torch.inf).argmax()), exact.shape[1])
    peak = float((out.float() - exact).abs().max() / exact.abs().max())
    of_row = f"worst row (token, head) {where}: {float(worst.max()):.3g}"
    message = f"error {error:.3g}, of the peak {peak:.3g}, {of_row}"
    assert error <= BOUND, message
    assert peak <= 2**-7, message
