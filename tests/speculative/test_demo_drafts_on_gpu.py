"""Text of the demo with drafts and the CUDA ops: token for token that without drafts, and rejected
drafts leave no trace. A step of this model gives a token the same bits whatever its length is.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, ModelConfig
from dsv4.caches.filled import filled_rows
from dsv4.checkpoint import load_weights, open_checkpoint, synthetic_weights
from dsv4.demo import CHECKPOINT
from dsv4.ops.tables import CUDA_TABLE
from dsv4.parallel.placement import Placement
from dsv4.weights.parameters import MtpKind
from tests.decode.demo import PROMPTS, load
from tests.speculative.on_gpu import KINDS, draft_state, told_text
from tests.speculative.scripted import GREEDY, NO_STOPS

pytestmark = pytest.mark.gpu

CONTEXT = 2048


def demo_with(kind: MtpKind, **settings: Any) -> Engine:
    """The demo with a random module."""
    checkpoint = open_checkpoint(CHECKPOINT)
    raw = dict(checkpoint.raw_config)
    layers = ModelConfig.from_dict(raw).num_hidden_layers
    if kind == "dspark":
        raw |= {
            "dspark_block_size": 5,
            "dspark_noise_token_id": 5,
            "dspark_target_layer_ids": [layers - 3, layers - 2, layers - 1],
            "dspark_markov_rank": 32,
            "compress_ratios": [*raw["compress_ratios"][:layers], 0, 0, 0],
        }
    config = ModelConfig.from_dict(raw)
    device = torch.device("cuda", 0)
    drawn = synthetic_weights(config, "bf16", 1, lambda _: device, kind)
    module = {name: weight for name, weight in drawn.items() if name.startswith("mtp.")}
    weights = {**load_weights(checkpoint, config, device_of=lambda _: device), **module}
    engine_config = EngineConfig(device="cuda", max_context=CONTEXT, **settings)
    placement = Placement.of_layers([device] * layers)
    return Engine(config, engine_config, weights, placement, CUDA_TABLE)


@pytest.fixture(scope="module")
def plain() -> Engine:
    return load()


@pytest.fixture(scope="module", params=KINDS)
def drafted(request: pytest.FixtureRequest) -> Engine:
    return demo_with(request.param, cuda_graph="full", draft_tokens=5)


def told(engine: Engine, prompt: list[int], text: list[int], off: int = 1) -> list[int]:
    """The greedy text with drafts of ``text``, some of them ``off``."""
    wrong = [off * int(place * 7 % 6 < 2) for place in range(len(prompt) + len(text))]
    return told_text(engine, prompt, [*prompt, *text], wrong, len(text), GREEDY)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_without_drafts(drafted: Engine, plain: Engine, prompt: str) -> None:
    ids = PROMPTS[prompt]
    expected = list(plain.generate(ids, 600, GREEDY, NO_STOPS))
    assert told(drafted, ids, expected) == expected


def test_a_token_has_the_same_logits_in_steps_of_every_length(plain: Engine) -> None:
    ids = PROMPTS["recall_128"]
    logits = {}
    for tokens in range(1, 9):
        plain.reset()
        plain.prefill(ids[:60])
        steps = [plain.decode(ids[at : at + tokens]) for at in range(60, 60 + 56, tokens)]
        logits[tokens] = torch.cat(steps)[:56]
    for tokens in range(2, 9):
        assert torch.equal(logits[tokens], logits[1]), tokens


def kept_rows(engine: Engine) -> list[Tensor]:
    """What later steps can read of the model, and of the module the keys of the window."""
    position = engine.position
    rows = filled_rows(engine.state.layers, position, 0)
    found = [part.clone() for one in rows for part in one.parts()]
    state = draft_state(engine)
    slots = torch.arange(max(0, position - state.stages[0].window), position - 1)
    rings = [keys.ring for keys in state.stages]
    return [*found, *(ring.data[(slots % ring.slots).to(ring.data.device)] for ring in rings)]


def test_rejected_drafts_leave_no_trace(drafted: Engine, plain: Engine) -> None:
    ids = PROMPTS["stories"]
    text = list(plain.generate(ids, 60, GREEDY, NO_STOPS))
    found = []
    for off in (1, 77):
        assert told(drafted, ids, text, off) == text
        found.append(kept_rows(drafted))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
