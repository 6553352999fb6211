"""The memory of a draft module that runs with the CUDA ops, beside its caches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.caches.draft import DraftState
from dsv4.config import ModelConfig
from dsv4.limits import MAX_DECODE_TOKENS, MAX_DRAFTS

# Steps whose tokens the host has not read have at most 16 of them.
RING_SLOTS = 32


@dataclass(frozen=True)
class DraftMemory:
    """``inputs`` int64 ``[8]`` on every device: the last token and the drafts behind it, which
    steps of up to 8 tokens read. ``ring_3R``: ``dsv4.ops.acceptance.settle_block``.

    The others are on the device of the head. ``drafts_N`` int64 ``[7]`` and ``logits_NV`` float32:
    the drafts, ``NAN_TOKEN`` among them, and what chose them. ``block_B``: the tokens of a block of
    DSpark. ``tails`` ``[R, M, E]`` and ``tail_tokens_R``: what a prompt's chunk leaves for the
    module's keys, the streams of every tap. ``shared``: of several ranks, where they put together
    the streams that a chunk leaves, one row more (``dsv4.speculative.shared_rows``).
    """

    inputs: Mapping[torch.device, Tensor]
    drafts_N: Tensor
    logits_NV: Tensor
    block_B: Tensor
    tails: tuple[Tensor, ...]
    tail_tokens_R: Tensor
    ring_3R: Tensor
    shared: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        state: DraftState,
        devices: Sequence[torch.device],
        taps: int,
        dtype: torch.dtype,
        ranks: int = 1,
    ) -> "DraftMemory":
        """For a module with these caches, whose device is that of the head; on the meta device
        nothing is allocated. ``ranks``: that share the model.
        """
        head = state.position_1.device

        def integers(count: int, device: torch.device) -> Tensor:
            memory = device if head.type != "meta" else head
            return torch.zeros(count, dtype=torch.int64, device=memory)

        rows = state.remembered_rows

        def streams(count: int, rows: int) -> tuple[Tensor, ...]:
            shape = (rows, config.hc_mult, config.hidden_size)
            return tuple(torch.zeros(shape, dtype=dtype, device=head) for _ in range(count))

        block = 1 if config.dspark is None else config.dspark.block_size
        logits = (MAX_DRAFTS, config.vocab_size)
        host = torch.device("cpu") if head.type == "cuda" else head
        pinned = head.type == "cuda"
        return cls(
            {device: integers(MAX_DECODE_TOKENS, device) for device in devices},
            integers(MAX_DRAFTS, head),
            torch.zeros(logits, dtype=torch.float32, device=head),
            integers(block, head),
            streams(taps, rows),
            integers(rows, head),
            torch.zeros((3, RING_SLOTS), dtype=torch.int64, device=host, pin_memory=pinned),
            streams(0 if ranks == 1 else taps, rows + 1),
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device of the head."""
        inputs, *_ = self.inputs.values()
        own = (inputs, self.drafts_N, self.logits_NV, self.block_B, self.tail_tokens_R)
        return sum(tensor.nbytes for tensor in (*own, *self.tails, *self.shared))
