"""Prompt steps that rank every token among those that could have stood in its place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.logprobs import TokenLogprobs, rank_rows
from dsv4.step.direct import DirectSteps
from dsv4.step.steps import RecordedSteps


class ScoredSteps:
    """Runs the chunks of a prompt; ``found`` has an entry for every token but the first.

    Logits are computed for ``MAX_DECODE_TOKENS`` positions at a time: a whole chunk of them takes
    gigabytes, which nobody has planned.
    """

    def __init__(
        self, steps: DirectSteps | RecordedSteps, token_ids: Sequence[int], count: int
    ) -> None:
        """``token_ids``: the whole prompt of a fresh sequence. ``count`` alternatives each."""
        self.found: list[TokenLogprobs] = []
        self._steps = steps
        self._token_ids = token_ids
        self._count = count

    def run(self, token_ids: Sequence[int]) -> Tensor:
        """Appends a chunk: final hidden states ``[T, E]``. The host waits for them."""
        # Logits are a step too, which overwrites what the one before it returned.
        hidden_TE = self._steps.run(token_ids).clone()
        following = self._token_ids[len(self.found) + 1 :][: len(token_ids)]
        for first in range(0, len(following), MAX_DECODE_TOKENS):
            tokens = following[first : first + MAX_DECODE_TOKENS]
            logits_TV = self._steps.logits(hidden_TE[first : first + len(tokens)])
            tokens_T = torch.tensor(tokens, dtype=torch.int64, device=logits_TV.device)
            ids_TN, logprobs_TN = rank_rows(logits_TV, tokens_T, self._count)
            self.found += map(TokenLogprobs.of, ids_TN.cpu(), logprobs_TN.cpu())
        return hidden_TE

    @property
    def logprobs_T(self) -> Tensor:
        """float32 ``[T - 1]``: of the tokens alone."""
        return torch.tensor([one.logprob for one in self.found], dtype=torch.float32)
