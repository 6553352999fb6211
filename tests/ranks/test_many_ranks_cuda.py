"""Four and eight ranks of Flash's first layers, on one stream of one GPU and on as many GPUs."""

from typing import Any, get_args

import pytest
import torch

from dsv4 import Engine, EngineConfig, ModelConfig
from dsv4.checkpoint import geometry_config, synthetic_rank_weights
from dsv4.decode import Mode
from dsv4.parallel.placement import Placement
from tests.decode.demo import GREEDY
from tests.ranks.on_gpu import IDS, bits, different_caches, mixed_steps, same

pytestmark = pytest.mark.gpu

CONFIG = ModelConfig.from_dict({**geometry_config("v4-flash", 4), "n_routed_experts": 32})
GPUS = [torch.device("cuda", index) for index in range(8)]


def ranks_on(devices: list[torch.device], **settings: Any) -> Engine:
    """A rank on each of the devices; ranks of the same number have the same random weights."""
    weights = [
        synthetic_rank_weights(CONFIG, "nvfp4-experts", 0, device, len(devices), rank)
        for rank, device in enumerate(devices)
    ]
    placement = Placement.tensor(CONFIG.num_hidden_layers, devices)
    given = {"device": "cuda", "max_context": 2048, "prefill_chunk": 512, **settings}
    return Engine(CONFIG, EngineConfig(**given), weights, placement)


@pytest.fixture(scope="module", params=[4, 8])
def one_stream(request: pytest.FixtureRequest) -> Engine:
    return ranks_on(GPUS[:1] * request.param)


@pytest.fixture(scope="module", params=[None, *get_args(Mode)])
def several_gpus(request: pytest.FixtureRequest, one_stream: Engine) -> Engine:
    count = len(one_stream.state.ranks)
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return ranks_on(GPUS[:count], cuda_graph=request.param)


def test_ranks_hold_the_same_bits(one_stream: Engine) -> None:
    """Logits of every step (``decoded``), and the caches behind all of them."""
    found = mixed_steps(one_stream)
    assert not any(bool(rows.isnan().any()) for rows in found)
    assert different_caches(one_stream, one_stream) == []
    assert same(mixed_steps(one_stream), found)


def test_gpus_equal_one_stream_bit_for_bit(several_gpus: Engine, one_stream: Engine) -> None:
    """Chunks, steps of 1 to 8 tokens, tokens that are taken back; the caches of all ranks, the
    logits of a whole prompt, and single tokens by replays.
    """
    for _ in range(2):
        assert same(mixed_steps(several_gpus), mixed_steps(one_stream))
        assert different_caches(several_gpus, one_stream) == []
    assert torch.equal(bits(several_gpus.logits(IDS).cpu()), bits(one_stream.logits(IDS).cpu()))
    for engine in (several_gpus, one_stream):
        engine.reset()
        engine.prefill(IDS[:120])
    for token in IDS[120:136]:
        found, expected = (one.decode([token]).cpu() for one in (several_gpus, one_stream))
        assert torch.equal(bits(found), bits(expected))


def test_gpus_generate_the_ids_of_one_stream(several_gpus: Engine, one_stream: Engine) -> None:
    found, expected = (
        list(engine.generate(IDS[:50], 64, GREEDY, stop_token_ids=()))
        for engine in (several_gpus, one_stream)
    )
    assert found == expected
