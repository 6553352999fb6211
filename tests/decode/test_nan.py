"""On a GPU, NaN that only comparisons meet ends prefill and decode in every mode, and leaves the
engine usable.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine
from tests.decode.demo import GREEDY, load

pytestmark = pytest.mark.gpu

# More entries than the 64 that a token may select, which are therefore scored.
PROMPT = [100 + 7 * index % 2000 for index in range(400)]


def index_key_norm(engine: Engine) -> Tensor:
    """NaN in it reaches index keys, and from there nothing but scores."""
    block = next(block for block in engine.model.blocks if block.attn.indexer is not None)
    return block.attn.compressors[1].norm


def expert_norm(engine: Engine) -> Tensor:
    """NaN in it reaches a router."""
    return engine.model.blocks[2].ffn_hc.norm


@pytest.fixture(scope="module", params=[None, "split", "full"], ids=["eager", "split", "full"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return load(cuda_graph=request.param)


@pytest.mark.parametrize("vector_of", [index_key_norm, expert_norm])
def test_nan_that_comparisons_hide_is_noticed(
    engine: Engine, vector_of: Callable[[Engine], Tensor]
) -> None:
    def generate(count: int) -> Any:
        return engine.generate(PROMPT, count, GREEDY, stop_token_ids=())

    tokens = generate(40)
    expected = [next(tokens) for _ in range(4)]
    vector = vector_of(engine)
    kept = vector.clone()
    try:
        vector.fill_(torch.nan)
        with pytest.raises(FloatingPointError, match="^NaN "):
            list(tokens)
        assert engine.position == 0
        with pytest.raises(FloatingPointError, match="^NaN "):
            next(generate(4))
        with pytest.raises(FloatingPointError, match="^NaN "):
            engine.prefill(PROMPT)
    finally:
        vector.copy_(kept)
    assert list(generate(4)) == expected


def test_steps_behind_a_stop_leave_no_notice(engine: Engine) -> None:
    """The steps in the queue meet NaN after the caller has closed the generator."""
    vector = expert_norm(engine)
    kept = vector.clone()
    tokens = engine.generate(PROMPT, 40, GREEDY, stop_token_ids=())
    expected = [next(tokens) for _ in range(4)]
    vector.fill_(torch.nan)
    tokens.close()
    vector.copy_(kept)
    assert list(engine.generate(PROMPT, 4, GREEDY, stop_token_ids=())) == expected
