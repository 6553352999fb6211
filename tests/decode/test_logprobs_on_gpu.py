"""Log-probabilities on a GPU: noted by the token loop behind the host, in every way to decode."""

from dataclasses import replace

import pytest
import torch

from dsv4 import Engine, SamplingParams
from dsv4.logprobs import TokenLogprobs, rank_tokens
from tests.decode.demo import GREEDY, PROMPTS, load

pytestmark = pytest.mark.gpu

NO_STOP: frozenset[int] = frozenset()
PROMPT = PROMPTS["stories"]
SAMPLINGS = (GREEDY, SamplingParams(1.5, 0.95, seed=3, top_k=20))


def noted(engine: Engine, sampling: SamplingParams) -> tuple[list[int], list[TokenLogprobs]]:
    tokens = list(engine.generate(PROMPT, 40, replace(sampling, logprobs=5), NO_STOP))
    assert engine.last_run is not None
    assert engine.last_run.logprobs is not None
    return tokens, list(engine.last_run.logprobs)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_they_are_those_of_each_steps_logits(eager: Engine, sampling: SamplingParams) -> None:
    tokens, found = noted(eager, sampling)
    eager.reset()
    logits_V = eager.prefill(PROMPT)
    for token, one in zip(tokens, found, strict=True):
        chosen = torch.tensor(token, device=logits_V.device)
        assert one == TokenLogprobs.of(*rank_tokens(logits_V, chosen, 5))
        logits_V = eager.decode([token])[0]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_replayed_steps_note_the_same(
    eager: Engine, graph: Engine, sampling: SamplingParams
) -> None:
    assert noted(graph, sampling) == noted(eager, sampling)
    plain = list(graph.generate(PROMPT, 40, sampling, NO_STOP))
    assert plain == noted(graph, sampling)[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", [None, "split", "full"])
def test_two_gpus_note_the_same(eager: Engine, mode: str | None) -> None:
    assert noted(load(gpus=2, cuda_graph=mode), SAMPLINGS[1]) == noted(eager, SAMPLINGS[1])
