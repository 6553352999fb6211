"""NaN or infinity that a step has met: the error, which names the value and the token that it began
in.
"""

from collections.abc import Generator, Sequence
from contextlib import closing, suppress

import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.layers.values import Watch
from dsv4.step.chunks import PromptChunks, split_ids
from dsv4.step.direct import DirectSteps
from dsv4.step.steps import RecordedSteps

# The traced values of a token take megabytes, and the first ones will do.
_TRACED_TOKENS = 64


class NaNSearch:
    """Repeats a step that met NaN or infinity, traced, from the state before it; then ends the
    sequence.
    """

    def __init__(self, steps: DirectSteps | RecordedSteps, prompt_chunks: PromptChunks) -> None:
        """``prompt_chunks``: how prompts are cut."""
        self._steps = steps
        self._state = steps.state
        self._prompt_chunks = prompt_chunks

    def watched(
        self, prompt: Sequence[int], tokens: Generator[int, None, None]
    ) -> Generator[int, None, None]:
        """``tokens`` behind ``prompt``, one step each; the error of a step gets a name."""
        sequence = list(prompt)
        try:
            with closing(tokens):
                for token in tokens:
                    sequence.append(token)
                    yield token
        except FloatingPointError:
            raise self.error(sequence[: self._state.position], len(prompt)) from None

    def checked(
        self, logits: Tensor, token_ids: list[int], before: int = 0, shown: bool = False
    ) -> Tensor:
        """``logits`` ``[..., V]`` of a prompt behind ``before`` others, unless its steps met NaN or
        a row has no distribution: NaN, +∞ or nothing but −∞.

        ``shown``: what is in the logits is the caller's to see. Raises ``FloatingPointError``.
        """
        in_logits = not bool(logits.amax(-1).isfinite().all())
        if (in_logits and not shown) or (self._state.met_nan and not in_logits):
            raise self.error(token_ids, len(token_ids), before)
        return logits

    @torch.inference_mode()
    def error(
        self, token_ids: list[int], prompt_tokens: int, before: int = 0
    ) -> FloatingPointError:
        """What to raise when the last step of a sequence met NaN or infinity: ``NaN in
        layers.3.indexer.scores at position 41``, without a name where the repeated step shows none.

        ``token_ids``: of these the first ``prompt_tokens`` were prefilled, the others came one by
        one. Behind ``before`` others they are not repeated. Leaves a new sequence.
        """
        place = None
        # The traced step has memory of its own, which nobody has planned.
        with suppress(torch.OutOfMemoryError):
            if before == 0:
                place = self._place(token_ids, prompt_tokens)
        self._state.start_sequence()
        if place is None:
            return FloatingPointError(f"NaN or infinity after {before + len(token_ids)} tokens")
        return FloatingPointError(place)

    def _place(self, token_ids: list[int], prompt_tokens: int) -> str | None:
        if len(token_ids) > prompt_tokens:
            self._state.rollback(len(token_ids) - 1)
            return self._first_fault([token_ids[-1:]])
        chunks = self._prompt_chunks.cut(token_ids)
        good = self._good_chunks(chunks)
        self._state.start_sequence()
        for chunk in chunks[:good]:
            self._steps.run(chunk)
        return self._first_fault(split_ids(chunks[good], [len(chunks[good])], _TRACED_TOKENS))

    def _good_chunks(self, chunks: Sequence[Sequence[int]]) -> int:
        """How many chunks are without NaN and infinity, not counting the last one."""
        self._state.start_sequence()
        for index, chunk in enumerate(chunks[:-1]):
            if not bool(self._steps.run(chunk).isfinite().all()) or self._state.met_nan:
                return index
        return len(chunks) - 1

    def _first_fault(self, pieces: Sequence[Sequence[int]]) -> str | None:
        """Appends the pieces up to the first with a fault; the last token's logits come last."""
        first = _FirstFault(self._state)
        run = self._steps.traced(Watch(first.see))
        for piece in pieces:
            first.begin(len(piece))
            hidden_TE = run(piece)
            if piece is pieces[-1]:
                first.see("logits", self._steps.logits(hidden_TE[-1:]))
            if first.place is not None:
                break
        return first.place


class _FirstFault:
    """The first value with NaN or +∞, of values seen in the order of their computation. −∞ is the
    score of an entry that there is not.
    """

    def __init__(self, state: DecodeState) -> None:
        self.place: str | None = None
        self._state = state
        self._start = 0
        self._tokens = 0

    def begin(self, tokens: int) -> None:
        """The values that follow are of the next so many tokens."""
        self._start = self._state.position
        self._tokens = tokens

    def see(self, name: str, value: Tensor) -> None:
        """``dsv4.layers.values.Seen``."""
        if self.place is not None:
            return
        is_faulty_T = (~(value < torch.inf)).flatten(1).any(1)
        if not bool(is_faulty_T.any()):
            return
        row = int(is_faulty_T.int().argmax())
        what = "NaN" if bool(value[row].isnan().any()) else "infinity"
        self.place = f"{what} in {name} at position {self._position(name, row, value.shape[0])}"

    def _position(self, name: str, row: int, rows: int) -> int:
        """Of the token that a row belongs to."""
        if rows == self._tokens:
            return self._start + row
        if not name.startswith("layers."):
            return self._start + self._tokens - 1  # the only row that was asked for
        # A compressed entry, by the token that completes it.
        ratio = self._state.layers[int(name.split(".")[1])].keys.ratio
        return (self._start // ratio + row + 1) * ratio - 1
