"""What a rank of tensor parallelism shares with the other ranks: the memory of the sums over them.

Every rank has an inbox, into which the kernels of all ranks write words {tag, float32}
(``dsv4/ops/_device/exchange.cuh``). An exchange is a sum of the partial results ``[T, E]`` of all
ranks. Exchanges take two slots in turn: a rank pushes exchange e + 2 only when it has read e + 1
of every rank, and these push e + 1 only behind what reads e. The logits have words of their own,
and so have rows that the ranks share (``dsv4.ops.linear.gathered_rows``): whoever pushes those of
the next layer has read a sum of this one, which every rank pushes behind what reads them. Logits
that follow logits without a sum in between begin with a barrier.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.integers import ceil_div
from dsv4.limits import MAX_DECODE_TOKENS

# Exchanges of a step that have numbers of their own (EXCHANGES_PER_STEP in exchange.cuh): two a
# layer, then the logits.
MOST_EXCHANGES = 256
LOGITS_EXCHANGE = MOST_EXCHANGES - 1
# Tags of 32 bits tell so many steps apart.
STEP_NUMBERS = (1 << 32) // MOST_EXCHANGES
WORD_BYTES = 8
SLOTS = 2
_LOGITS_SLOT = SLOTS
_ROWS_SLOT = SLOTS + 1
# The first one counts the steps; nothing reads the others.
STEP_WORDS = 4
# Set, exchange, missing rank, step.
FAULT_WORDS = 4
# Rows of the head are cut in these units, because no vocabulary need be a multiple of the ranks.
HEAD_ROWS = 16


@dataclass(frozen=True)
class InboxLayout:
    """The words of an inbox of ``ranks`` ranks: partial sums of ``width`` columns, and logits of
    ``vocabulary`` tokens. ``listed``: entries that the indexer chooses for a token.
    """

    ranks: int
    width: int
    vocabulary: int
    listed: int = 0

    @classmethod
    def of(cls, config: ModelConfig, ranks: int) -> "InboxLayout":
        """``config``: of the whole model."""
        return cls(ranks, config.hidden_size, config.vocab_size, config.index_topk)

    @property
    def head_rows(self) -> int:
        """The most rows of the head that a rank has (``dsv4.parallel.sharding.cut_of``)."""
        return ceil_div(self.vocabulary, HEAD_ROWS * self.ranks) * HEAD_ROWS

    @property
    def rank_words(self) -> int:
        """From the words of one rank to those of the next one: room for 8 tokens of either kind."""
        return MAX_DECODE_TOKENS * max(self.width, self.head_rows)

    @property
    def words(self) -> int:
        """The words of an inbox."""
        return (SLOTS + 2) * self.ranks * self.rank_words

    @property
    def nbytes(self) -> int:
        """The bytes of an inbox."""
        return WORD_BYTES * self.words

    def slot(self, exchange: int) -> int:
        """The first word of an exchange."""
        slot = _LOGITS_SLOT if exchange == LOGITS_EXCHANGE else exchange % SLOTS
        return slot * self.ranks * self.rank_words

    @property
    def rows_slot(self) -> int:
        """The first word of rows that the ranks share."""
        return _ROWS_SLOT * self.ranks * self.rank_words


@dataclass(frozen=True)
class Peers:
    """One rank's view of all of them.

    ``table_P`` int64: addresses of the inboxes of all ranks, of this rank's own, of ``step_4``, of
    ``fault_4``, and of the ``partials_STE``, the ``inputs_TE`` and the ``chosen_TK`` of all ranks.
    ``inbox`` int64: this rank's words. ``step_4`` int32: how many steps were begun, in the first
    word. ``fault_4`` int32, pinned where the ranks are GPUs: what a kernel that gave up waiting
    says (set, exchange, missing rank, step). ``partials_STE`` float32: this rank's partial results
    in prefill steps, which the others read, in two slots that take turns. ``inputs_TE`` bfloat16
    and ``chosen_TK`` int64: the input of a sublayer of a prefill step, and the entries that the
    indexer chose for its tokens; all ranks write their rows, each those of its tokens.
    ``stamps_X2``: see ``dsv4.parallel.stamps``, None in every run that is no measurement.
    """

    rank: int
    layout: InboxLayout
    table_P: Tensor
    inbox: Tensor
    step_4: Tensor
    fault_4: Tensor
    partials_STE: Tensor
    inputs_TE: Tensor
    chosen_TK: Tensor
    stamps_X2: Tensor | None = None

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.layout.ranks

    @classmethod
    def planned(cls, rank: int, layout: InboxLayout, tokens: int) -> "Peers":
        """Without memory; ``tokens`` of the longest step."""

        def memory(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        return cls(
            rank,
            layout,
            memory(4 * layout.ranks + 3, dtype=torch.int64),
            memory(layout.words, dtype=torch.int64),
            memory(STEP_WORDS, dtype=torch.int32),
            memory(FAULT_WORDS, dtype=torch.int32),
            memory(SLOTS, tokens, layout.width, dtype=torch.float32),
            memory(tokens, layout.width, dtype=torch.bfloat16),
            memory(tokens, layout.listed, dtype=torch.int64),
        )


@contextmanager
def naming_missing_words(fault_4: Tensor) -> Iterator[None]:
    """Around waiting for a device: ``RuntimeError`` where a kernel has waited for a rank in vain
    (``Peers.fault_4``).
    """
    try:
        yield
    except torch.AcceleratorError as error:
        is_set, exchange, rank, step = fault_4.tolist()
        if not is_set:
            raise
        missing = f"words of rank {rank} did not come (exchange {exchange} of step {step})"
        raise RuntimeError(f"CUDA error: {missing}") from error
