"""Tiny engines with random draft modules."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, ModelConfig
from dsv4.layers.weights import Weights
from dsv4.opened_draft import FLAG_OF_KIND
from dsv4.ops import TORCH
from dsv4.parallel.placement import Placement
from dsv4.weights.parameters import MtpKind, parameters
from tests.model.tiny import CPU, direct, random_values, small_config, wrap

# A window that prompts and answers of tests cross more than once.
WINDOW = 16
RATIOS = (0, 4, 128, 4)
DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 9,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 12,
}
KINDS: tuple[MtpKind, ...] = ("classic", "dspark")


def drafted_config(kind: MtpKind, **changes: Any) -> ModelConfig:
    """A model that a module of this kind can be put to."""
    keys = DSPARK if kind == "dspark" else {}
    raw = small_config(RATIOS, 1, sliding_window=WINDOW, index_topk=4, **keys)
    return ModelConfig.from_dict({**raw, **changes})


def drafted_weights(config: ModelConfig, kind: MtpKind, seed: int = 0) -> Weights:
    """Random values of the model and its module, those of the model as without a module."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: wrap(
            parameter, random_values(name, parameter.shape, config.n_routed_experts, generator)
        )
        for name, parameter in parameters(config, kind).items()
    }


def engine_of(config: ModelConfig, weights: Weights, **settings: Any) -> Engine:
    """An engine on the CPU: float32, caches not quantised, unless ``settings`` differ."""
    exact = {"device": "cpu", "kv_dtype": "bf16", "compute_dtype": "float32", "max_context": 512}
    placement = Placement.of_layers((CPU,) * config.num_hidden_layers)
    engine_config = EngineConfig(**{**exact, **settings})
    return Engine(config, engine_config, weights, placement, direct(TORCH))


def drafted_engine(kind: MtpKind, seed: int = 0, **settings: Any) -> Engine:
    """An engine that drafts, whether that is faster or not."""
    config = drafted_config(kind)
    settings = {"draft": FLAG_OF_KIND[kind], **settings}
    return engine_of(config, drafted_weights(config, kind, seed), **settings)


def plain_engine(kind: MtpKind, seed: int = 0, **settings: Any) -> Engine:
    """The same model without its module."""
    config = drafted_config(kind)
    weights = drafted_weights(config, kind, seed)
    main = {name: weights[name] for name in weights if not name.startswith("mtp.")}
    return engine_of(replace(config, dspark=None), main, **settings)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """What float32 and another order of its sums change of logits of up to some 10."""
    torch.testing.assert_close(found.double(), expected.double(), rtol=2e-4, atol=2e-4)
