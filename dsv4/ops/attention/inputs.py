"""The arguments of ``sparse_attention`` as one value, and what all of its kernels ask of them."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.caches.layer import KeySet
from dsv4.launch.buffers import is_aligned
from dsv4.launch.checks import expect
from dsv4.ops.key_rows import check_key_rows


class AttentionInputs(NamedTuple):
    """See ``dsv4.ops.attention.sparse_attention``."""

    q_THD: Tensor
    keys: KeySet
    selected_TK: Tensor | None
    sink_H: Tensor
    positions_T: Tensor
    inv_freq: Tensor

    @classmethod
    def checked(
        cls,
        q_THD: Tensor,
        keys: KeySet,
        selected_TK: Tensor | None,
        sink_H: Tensor,
        positions_T: Tensor,
        inv_freq: Tensor,
    ) -> "AttentionInputs":
        """Raises ``ValueError`` unless the plain kernel takes these, which takes the most."""
        if keys.compressed is None:
            selected_TK = None
        inputs = cls(q_THD, keys, selected_TK, sink_H, positions_T, inv_freq)
        _check(inputs)
        return inputs

    @property
    def entries(self) -> int:
        """Slots for compressed entries."""
        return 0 if self.keys.compressed is None else self.keys.compressed.slots

    @property
    def listed(self) -> int:
        """How long the list of a token is."""
        return 0 if self.selected_TK is None else self.selected_TK.shape[1]

    @property
    def cache_arguments(self) -> dict[str, Tensor | None]:
        """The caches by the names that kernels give them which read rows as they are stored."""
        ring = self.keys.ring
        compressed = self.keys.compressed
        return {
            "ring_data": ring.data,
            "ring_scale": ring.block_scale,
            "entries_data": None if compressed is None else compressed.data,
            "entries_scale": None if compressed is None else compressed.block_scale,
        }

    def all_of_first(self, entries: int) -> "AttentionInputs":
        """The same where tokens see every complete one of the first ``entries`` entries."""
        assert self.keys.compressed is not None
        keys = replace(self.keys, compressed=self.keys.compressed.first(entries))
        return self._replace(keys=keys, selected_TK=None)

    def without_entries(self) -> "AttentionInputs":
        """The same where nobody sees a compressed entry."""
        return self._replace(keys=replace(self.keys, compressed=None), selected_TK=None)


def check_alignment(q_THD: Tensor) -> None:
    """Raises ``ValueError`` unless queries can be read 16 bytes at a time."""
    if not is_aligned(q_THD):
        raise ValueError("q_THD: found an address between multiples of 16, expected a multiple")


def _check(inputs: AttentionInputs) -> None:
    keys = inputs.keys
    tokens, heads = inputs.q_THD.shape[:2]
    expect("q_THD", inputs.q_THD, torch.bfloat16, (tokens, heads, keys.ring.width))
    expect("sink_H", inputs.sink_H, torch.float32, (heads,))
    expect("positions_T", inputs.positions_T, torch.int64, (tokens,))
    expect("inv_freq", inputs.inv_freq, torch.float32, (keys.ring.rope_width // 2,))
    check_key_rows("keys.ring", keys.ring)
    if keys.compressed is not None:
        check_key_rows("keys.compressed", keys.compressed)
        found, expected = (
            (cache.format, cache.data.dtype, cache.width, cache.rope_width)
            for cache in (keys.compressed, keys.ring)
        )
        if found != expected:
            raise ValueError(f"keys.compressed: found {found}, expected the ring's {expected}")
    if inputs.selected_TK is not None:
        listed = inputs.selected_TK.shape[-1]
        expect("selected_TK", inputs.selected_TK, torch.int64, (tokens, listed))
