"""Random models with draft modules on a GPU: the CUDA ops and the torch ops of one model, and
drafts that are told.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, ModelConfig
from dsv4.caches.draft import DraftState
from dsv4.checkpoint import synthetic_weights, tiny_config
from dsv4.decode.drafted_decoder import DraftedDecoder
from dsv4.opened_draft import FLAG_OF_KIND
from dsv4.ops.tables import CUDA_TABLE, TORCH_TABLE
from dsv4.parallel.placement import Placement
from dsv4.speculative.recorded_steps import DraftedRecordedSteps, EagerBlocks
from dsv4.validate.decode_checks import cache_tensors
from dsv4.weights.parameters import MtpKind

KINDS: tuple[MtpKind, ...] = ("classic", "dspark")
MODES = (None, "split", "full")
WINDOW = 16
VOCABULARY = 256
# The geometry that the fast kernels know, and another one.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "usual": {"head_dim": 512, "num_attention_heads": 16, "hidden_size": 256},
    "small": {},
}


def drafted_config(kind: MtpKind | None, geometry: str) -> ModelConfig:
    """A model of four layers with a window that tests cross; for ``kind`` None without a module."""
    keys: dict[str, Any] = {}
    if kind == "dspark":
        keys = {
            "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
            "dspark_block_size": 5,
            "dspark_noise_token_id": 200,
            "dspark_target_layer_ids": [1, 2, 3],
            "dspark_markov_rank": 32,
        }
    raw = tiny_config(sliding_window=WINDOW, max_position_embeddings=4096, **keys)
    return ModelConfig.from_dict({**raw, **GEOMETRIES[geometry]})


def engine_on_gpu(
    kind: MtpKind, drafted: bool = True, geometry: str = "usual", gpus: int = 1, **settings: Any
) -> Engine:
    """An engine of random weights, the same for equal arguments; ``drafted``: with its module."""
    config = drafted_config(kind, geometry)
    ops = settings.pop("ops", "cuda")
    usual = {"device": "cuda", "max_context": 512, "prefill_chunk": 64, "draft": FLAG_OF_KIND[kind]}
    settings = {**usual, "ops": ops, **settings}
    devices = [torch.device("cuda", index) for index in range(gpus)]
    layers = config.num_hidden_layers
    per_device = -(-layers // gpus)
    # The module reads the last three layers.
    split = [devices[0]] * (layers - 3) + [devices[-1]] * 3 if gpus > 1 else devices * per_device
    placement = Placement.of_layers(split)
    first = synthetic_weights(config, "nvfp4-experts", 3, lambda _: devices[0], kind)
    weights = {
        name: weight.to(placement.device_of(name))
        for name, weight in first.items()
        if drafted or not name.startswith("mtp.")
    }
    if not drafted:
        config = drafted_config(None, geometry)
    table = TORCH_TABLE if ops == "torch" else CUDA_TABLE
    return Engine(config, EngineConfig(gpus=gpus, **settings), weights, placement, table)


def steps_of(engine: Engine) -> DraftedRecordedSteps:
    """The recorded steps of an engine that drafts."""
    assert isinstance(engine.steps, DraftedRecordedSteps)
    return engine.steps


@torch.inference_mode()
def recorded_drafts(engine: Engine, token: int, count: int) -> tuple[list[int], Tensor]:
    """Greedy drafts behind the engine's sequence and ``token``, and their logits."""
    steps = steps_of(engine)
    memory = steps.along.memory
    memory.inputs[steps.head][:1].fill_(token)
    step = steps.draft_step(count)
    step.run(step.tokens)
    return memory.drafts_N[:count].tolist(), memory.logits_NV[:count].clone()


def draft_state(engine: Engine) -> DraftState:
    """The module's caches."""
    assert engine.state.draft is not None
    return engine.state.draft


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """Copies of every cache of the model and of its module."""
    found = {name: cache.clone() for name, cache in cache_tensors(engine.state)}
    state = draft_state(engine)
    for index, keys in enumerate(state.stages):
        found[f"draft {index}"] = keys.ring.data.clone()
        if keys.ring.block_scale is not None:
            found[f"draft {index} scale"] = keys.ring.block_scale.clone()
    if state.streams_SME is not None:
        found["streams"] = state.streams_SME.clone()
    return found


class ToldBlocks:
    """``BlockQueue`` whose drafts are those of a text, from place ``p + 1`` on for a token at p; at
    some places wrong: ``wrong_D`` says by how much an id is off there.
    """

    def __init__(self, engine: Engine, text: list[int], wrong: list[int]) -> None:
        self._steps = steps_of(engine)
        decoder = engine.decoder
        self._queue: Any = EagerBlocks(self._steps)
        if isinstance(decoder, DraftedDecoder):
            self._queue = decoder.blocks()
        head = self._steps.head
        self._vocabulary = engine.config.vocab_size
        padded = [*text, *[5] * 16]
        self._text = torch.tensor(padded, device=head)
        self._wrong = torch.tensor([*wrong, *[0] * 16], device=head)[: len(padded)]
        self.feed = self._queue.feed
        self.verify = self._queue.verify
        self.logits = self._queue.logits
        self.alone = self._queue.alone

    def draft(self, count: int) -> None:
        """The module drafts too: its rows are part of the state."""
        self._queue.draft(count)
        steps = self._steps
        position_1, rejected_1 = steps.state.place(steps.head)
        first_1 = position_1 - rejected_1 + 1
        at = (first_1 + torch.arange(count, device=first_1.device)).clamp(max=len(self._text) - 1)
        drafts = (self._text[at] + self._wrong[at]) % self._vocabulary
        memory = steps.along.memory
        memory.drafts_N[:count].copy_(drafts)
        memory.inputs[steps.head][1 : count + 1].copy_(drafts)
        memory.logits_NV[:count].zero_()


def told_text(
    engine: Engine, prompt: list[int], told: list[int], wrong: list[int], count: int, sampling: Any
) -> list[int]:
    """``count`` tokens behind ``prompt`` with drafts of ``told``, the text of prompt and answer."""
    from dsv4.sampling import Sampler

    steps = steps_of(engine)
    engine.reset()
    sampler = Sampler(sampling)
    hidden_TE = engine.steps.run(prompt)
    first = steps.first_token(sampler, hidden_TE)
    blocks = ToldBlocks(engine, told, wrong)
    decoder = engine.decoder
    if isinstance(decoder, DraftedDecoder):
        tokens = decoder.following(first, sampler, count - 1, blocks)
    else:
        tokens = steps.follow(first, sampler, count - 1, blocks)
    return [first, *tokens]
