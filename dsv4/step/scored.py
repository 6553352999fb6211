"""Prompt steps that rank every token among those that could have stood in its place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.logprobs import TokenLogprobs, rank_rows
from dsv4.step.direct import DirectSteps
from dsv4.step.logit_parts import logits_in_parts
from dsv4.step.steps import RecordedSteps


class ScoredSteps:
    """Runs the chunks of a prompt; ``found`` has an entry for every token but the first."""

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
        hidden_TE = self._steps.run(token_ids)
        following = self._token_ids[len(self.found) + 1 :][: len(token_ids)]
        done = 0
        for logits_TV in logits_in_parts(self._steps, hidden_TE[: len(following)]):
            tokens = following[done : done + len(logits_TV)]
            done += len(tokens)
            tokens_T = torch.tensor(tokens, dtype=torch.int64, device=logits_TV.device)
            ids_TN, logprobs_TN = rank_rows(logits_TV, tokens_T, self._count)
            self.found += map(TokenLogprobs.of, ids_TN.cpu(), logprobs_TN.cpu())
        return hidden_TE

    @property
    def logprobs_T(self) -> Tensor:
        """float32 ``[T - 1]``: of the tokens alone."""
        return torch.tensor([one.logprob for one in self.found], dtype=torch.float32)
