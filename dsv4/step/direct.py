"""Steps with ops that compute when they are called: the torch ops, on any device."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.layers.values import UNTRACED, ValueSink, Watch, completed_rows
from dsv4.model import Arrival, Outputs, PartKind, Transformer
from dsv4.ops import Ops, noticing_nan
from dsv4.run_stats import DraftStats
from dsv4.sampling import Sampler, SamplerState, checked_token
from dsv4.step.lock_step import JoinedValues
from dsv4.step.meeting import Meeting, RankOps
from dsv4.step.observer import Observer, open_part

Result = TypeVar("Result")


class DirectParts:
    """The ``Parts`` of a step that is computed as it is written."""

    def __init__(
        self, ops: Ops, tokens_T: Tensor, values: ValueSink, observer: Observer | None = None
    ) -> None:
        self.values = values
        self._ops = ops
        self._tokens_T = tokens_T
        self._observer = observer

    def part(
        self, kind: PartKind, device: torch.device, layer: int | None = None
    ) -> AbstractContextManager[Ops]:
        """The table, with ``device`` as the current one."""
        return open_part(self._ops, self._observer, kind, device, layer)

    def tokens(self, device: torch.device) -> Tensor:
        """A copy on ``device``."""
        return self._tokens_T.to(device)

    def hand_off(self, streams_TME: Tensor, source: torch.device, target: torch.device) -> Arrival:
        """A copy on ``target``."""
        with nullcontext() if self._observer is None else self._observer.hand_off(source, target):
            arrived_TME = streams_TME.to(target)
        return lambda: arrived_TME


class DirectValues:
    """The values of a step that is computed as it is written, copied to the host for ``watch``."""

    def __init__(self, watch: Watch, state: DecodeState, tokens: int) -> None:
        self._watch = watch
        self._state = state
        self._tokens = tokens

    def wants(self, name: str) -> bool:
        """As ``watch`` says."""
        return self._watch.wants(name)

    def value(self, name: str, tensor: Tensor, ratio: int = 1) -> None:
        """Shows the rows that the step completed."""
        if self.wants(name):
            start = self._state.position - self._tokens
            rows = completed_rows(start, self._tokens, ratio)
            # A copy on the CPU too: what is shown may be written to, and the step goes on.
            self._watch.seen(name, tensor[:rows].to("cpu", copy=True))

    def compute(
        self,
        function: Callable[..., Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *tensors: Tensor,
    ) -> Tensor:
        """At once."""
        return function(*tensors)


class DirectSteps:
    """Every step of an engine, of any length. ``observer`` sees them."""

    def __init__(self, models: Sequence[Transformer], state: DecodeState, ops: Ops) -> None:
        """``models`` of all ranks, on ``state.ranks``."""
        self.models = tuple(models)
        self.state = state
        self.ops = noticing_nan(ops, state.nan_1)
        self._decode_ops = self.ops
        self.observer: Observer | None = None
        self._sampler = SamplerState.allocate(self.model.head_device)

    @property
    def model(self) -> Transformer:
        """That of rank 0."""
        return self.models[0]

    def run(self, token_ids: Sequence[int]) -> Tensor:
        """Appends tokens: final hidden states ``[T, E]``."""
        return self._run(token_ids, self.ops).hidden_TE

    def decode(self, token_ids: Sequence[int]) -> Tensor:
        """Appends tokens: float32 logits ``[T, V]``."""
        logits_TV = self._run(token_ids, self._decode_ops, logits=True).logits_TV
        assert logits_TV is not None
        return logits_TV

    def traced(self, watch: Watch) -> Callable[[Sequence[int]], Tensor]:
        """``run`` that shows ``watch`` the values of each step."""

        def run(token_ids: Sequence[int]) -> Tensor:
            return self._run(token_ids, self.ops, watch).hidden_TE

        return run

    @torch.inference_mode()
    def logits(self, hidden_TE: Tensor) -> Tensor:
        """float32 ``[T, V]`` of final hidden states."""
        return self._on_ranks(lambda rank, ops: self._rank_logits(rank, ops, hidden_TE), self.ops)

    @torch.inference_mode()
    def sample(self, sampler: Sampler, logits_V: Tensor) -> int:
        """The token that follows, chosen by ``sampler``. Raises ``FloatingPointError`` for NaN."""
        self._sampler.load(sampler)
        position_1 = self.state.positions_1[self.model.head_device]
        with self._head_part("sample") as ops:
            token = self._sampler.choose(ops, logits_V, position_1)
        chosen = checked_token(int(token), self.state.position, self.state.met_nan)
        sampler.note(logits_V, token)
        return chosen

    def first_token(self, sampler: Sampler, hidden_TE: Tensor) -> int:
        """The token behind a prompt whose last hidden state is the last row."""
        return self.sample(sampler, self.logits(hidden_TE[-1:])[0])

    def following(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """Yields the tokens behind ``token``, one step each."""
        for _ in range(steps):
            token = self.sample(sampler, self.decode([token])[0])
            yield token

    def draft_stats(self) -> DraftStats | None:
        """How drafts did in the last run; None: nothing drafts."""
        return None

    @torch.inference_mode()
    def _run(
        self,
        token_ids: Sequence[int],
        ops: Ops,
        watch: Watch | None = None,
        logits: bool = False,
    ) -> Outputs:
        if self.observer is not None:
            self.observer.begin_step()
        tokens_T = torch.tensor(token_ids, dtype=torch.int64)
        joined = None if watch is None else JoinedValues(watch.seen, len(self.models))

        def run(rank: int, ops: Ops) -> Outputs:
            values: ValueSink = UNTRACED
            if watch is not None and joined is not None:
                seen = Watch(joined.of(rank), watch.wants)
                values = DirectValues(seen, self.state, len(token_ids))
            if rank == 0:
                values = self._tapped(values)
            parts = DirectParts(ops, tokens_T, values, self._observer_of(rank))
            return self.models[rank](parts, self.state.ranks[rank], logits)

        start = self.state.position
        with self.state.appending():
            self.state.advance(len(token_ids))
            outputs = self._on_ranks(run, ops)
            self._computed(token_ids, start)
        return outputs

    def _computed(self, token_ids: Sequence[int], start: int) -> None:
        """What a step does last, with ``token_ids`` computed at the position ``start``."""

    def _tapped(self, values: ValueSink) -> ValueSink:
        """What a step shows its values; others may read them on the way to ``values``."""
        return values

    def _rank_logits(self, rank: int, ops: Ops, hidden_TE: Tensor) -> Tensor:
        model = self.models[rank]
        observer = self._observer_of(rank)
        device = model.head_device
        with open_part(ops, observer, "head", device) as head_ops:
            ranks_logits = model.head.logits(head_ops, hidden_TE.to(device))
        with open_part(ops, observer, "logits", device) as head_ops:
            return head_ops.gather_logits(ranks_logits)

    def _on_ranks(self, run: Callable[[int, Ops], Result], ops: Ops) -> Result:
        """``run(rank, ops)`` of all ranks, side by side, with the ``ops`` of a lone one; the result
        of rank 0.
        """
        if len(self.models) == 1:
            return run(0, ops)
        meeting = Meeting(len(self.models))
        tables = [RankOps(ops, meeting, rank).table() for rank in range(len(self.models))]
        return meeting.run([partial(run, rank, table) for rank, table in enumerate(tables)])[0]

    def _observer_of(self, rank: int) -> Observer | None:
        """Who watches: of several ranks the first one."""
        return self.observer if rank == 0 else None

    def _head_part(self, kind: PartKind) -> AbstractContextManager[Ops]:
        return open_part(self.ops, self.observer, kind, self.model.head_device)
