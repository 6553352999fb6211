"""The steps of an engine as a trace runs them: the same kernels in the same mode, values shown."""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from dsv4.decode import CUDAGraphDecoder
from dsv4.layers.values import Watch
from dsv4.sampling import Sampler
from dsv4.step.direct import DirectSteps
from dsv4.step.logit_parts import logits_in_parts
from dsv4.step.steps import RecordedSteps

LOGITS = "logits"


class ShownValues:
    """What a trace shows, kept in memory."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Tensor]] = {}

    def add(self, name: str, rows: Tensor) -> None:
        """The next rows of a value."""
        self._rows.setdefault(name, []).append(rows)

    def joined(self) -> dict[str, Tensor]:
        """Every value with all of its rows."""
        return {name: torch.cat(rows) for name, rows in self._rows.items()}


class TracedSteps:
    """Steps that show ``watch`` their values and then, last, ``positions`` and ``token_ids``.

    ``decoder``: single tokens are replayed in its mode, by a decoder of their own; None: eager.
    """

    def __init__(
        self,
        steps: DirectSteps | RecordedSteps,
        watch: Watch,
        decoder: CUDAGraphDecoder | None,
    ) -> None:
        self._steps = steps
        self._watch = watch
        self._run = steps.traced(watch)
        self._untraced = decoder
        self._decoder: CUDAGraphDecoder | None = None

    def run(self, token_ids: Sequence[int]) -> Tensor:
        """Appends tokens eagerly: final hidden states ``[T, E]``."""
        hidden_TE = self._run(token_ids)
        if self._watch.wants(LOGITS):
            for part_TV in logits_in_parts(self._steps, hidden_TE):
                self._watch.seen(LOGITS, part_TV.to("cpu", copy=True))
        self._end_step(token_ids)
        return hidden_TE

    def decode(self, token: int) -> Tensor:
        """Appends a token in the engine's mode: final hidden state ``[1, E]``, as ``run``."""
        if self._untraced is None:
            return self.run([token])
        if self._decoder is None:
            self._decoder = self._untraced.traced(self._watch.wants)
        position = self._steps.state.position
        self._decoder.replay(token, position)
        step = self._decoder.step(1)
        step.show(self._watch.seen, position)
        self._end_step([token])
        return step.hidden_TE

    def feed(self, chunks: Sequence[Sequence[int]], single: Sequence[int]) -> None:
        """Appends tokens in ``chunks``, then one by one."""
        for chunk in chunks:
            self.run(chunk)
        for token in single:
            self.decode(token)

    def first_token(self, sampler: Sampler, hidden_TE: Tensor) -> int:
        """The token behind the last row. Raises ``FloatingPointError`` for NaN."""
        return self._steps.first_token(sampler, hidden_TE)

    def following(self, token: int, sampler: Sampler, steps: int) -> Generator[int, None, None]:
        """Yields the tokens behind ``token``, one step each."""
        for _ in range(steps):
            hidden_TE = self.decode(token)
            token = self.first_token(sampler, hidden_TE)
            yield token

    def _end_step(self, token_ids: Sequence[int]) -> None:
        position = self._steps.state.position
        start = position - len(token_ids)
        self._watch.seen("positions", torch.arange(start, position))
        self._watch.seen("token_ids", torch.tensor(token_ids, dtype=torch.int64))
