"""Greedy text with drafts in the shapes of Flash, over thousands of tokens: token for token that
without drafts, and the same caches, because the kernels of a step give a token the same bits
whatever its length is and whatever is beside it. Random weights choose experts and tokens by much
smaller margins than trained ones.
"""

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, ModelConfig
from dsv4.caches.filled import filled_rows
from dsv4.checkpoint import geometry_config, synthetic_weights
from dsv4.ops.tables import CUDA_TABLE
from dsv4.parallel.placement import Placement
from tests.model.tiny import random_ids
from tests.speculative.on_gpu import told_text
from tests.speculative.scripted import GREEDY, NO_STOPS

pytestmark = pytest.mark.gpu

# Window, CSA and HCA; from 2,048 tokens on CSA selects its keys.
LAYERS = 6
CONTEXT = 4096
PROMPT = 40
TOKENS = 3000
# The longest step has eight tokens.
DRAFTS = 7


def flash_like(drafted: bool) -> Engine:
    """Six layers with few experts and a small vocabulary."""
    raw = {**geometry_config("v4-flash", LAYERS), "n_routed_experts": 32, "vocab_size": 4096}
    config = ModelConfig.from_dict(raw)
    device = torch.device("cuda", 0)
    drawn = synthetic_weights(config, "nvfp4-experts", 7, lambda _: device, "classic")
    weights = {name: one for name, one in drawn.items() if drafted or not name.startswith("mtp.")}
    engine_config = EngineConfig(
        device="cuda",
        max_context=CONTEXT,
        prefill_chunk=512,
        cuda_graph="full",
        draft_tokens=DRAFTS if drafted else None,
    )
    placement = Placement.of_layers([device] * LAYERS)
    return Engine(config, engine_config, weights, placement, CUDA_TABLE)


def kept_rows(engine: Engine) -> list[Tensor]:
    """What later steps can read of the caches."""
    rows = filled_rows(engine.state.layers, engine.position, 0)
    return [torch.cat([*one.parts()]) for one in rows if one.count]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_ids(PROMPT, seed=1)


@pytest.fixture(scope="module")
def expected(prompt: list[int]) -> tuple[list[int], list[Tensor]]:
    """Text and caches without drafts."""
    engine = flash_like(drafted=False)
    text = list(engine.generate(prompt, TOKENS, GREEDY, NO_STOPS))
    return text, kept_rows(engine)


@pytest.fixture(scope="module")
def drafted() -> Engine:
    return flash_like(drafted=True)


@pytest.mark.parametrize("wrong_share", [0.1, 0.4])
def test_text_and_caches_are_those_without_drafts(
    drafted: Engine, prompt: list[int], expected: tuple[list[int], list[Tensor]], wrong_share: float
) -> None:
    """Whatever is accepted, and whatever the rejected drafts are."""
    text, rows = expected
    assert len(set(text)) > 100, "a text that repeats itself would show little"
    generator = torch.Generator().manual_seed(int(10 * wrong_share))
    places = PROMPT + TOKENS
    off = torch.randint(1, 4096, (places,), generator=generator)
    wrong = off * (torch.rand(places, generator=generator) < wrong_share)
    told = [*prompt, *text]
    assert told_text(drafted, prompt, told, wrong.tolist(), TOKENS, GREEDY) == text
    for found, row in zip(kept_rows(drafted), rows, strict=True):
        assert torch.equal(found.view(torch.uint8), row.view(torch.uint8))
