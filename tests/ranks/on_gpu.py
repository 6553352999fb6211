"""Ranks of the demo on GPUs: on streams of their own, or all on one stream of one GPU."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig
from dsv4.caches.filled import filled_rows
from dsv4.checkpoint import load_ranks, open_checkpoint
from dsv4.checkpoint.identity import Identity, checkpoint_identity
from dsv4.checkpoint.load import load_found_ranks
from dsv4.checkpoint.stored_parameters import find_draft
from dsv4.demo import CHECKPOINT, DRAFTS
from dsv4.opened_draft import KIND_OF_FLAG
from dsv4.parallel.placement import Placement
from dsv4.step.lock_step import LockStep
from dsv4.step.steps import RecordedSteps
from tests.decode.demo import PROMPTS, load

RANKS = 2
IDS: list[int] = (PROMPTS["stories"] + PROMPTS["recall_128"] * 2)[:300]


def one_stream(draft: str | None = None, **settings: Any) -> Engine:
    """Both ranks on one GPU, eagerly: what no kernel that waits can hang. ``draft``: with the
    demo's module of this name.
    """
    checkpoint = open_checkpoint(CHECKPOINT)
    config = checkpoint.model_config()
    devices = (torch.device("cuda", 0),) * RANKS
    placement = Placement.tensor(config.num_hidden_layers, devices)
    weights = load_ranks(checkpoint, config, placement)
    if draft is not None:
        holder = open_checkpoint(DRAFTS[draft])
        config = replace(config, dspark=holder.model_config().dspark)
        found = find_draft(holder, config, KIND_OF_FLAG[draft])
        modules = load_found_ranks(holder, config, found, placement)
        weights = [{**own, **module} for own, module in zip(weights, modules, strict=True)]
        settings = {"draft": draft, **settings}
    engine = EngineConfig(**{"device": "cuda", "max_context": 2048, **settings})
    identity = Identity(checkpoint_identity(checkpoint))
    return Engine(config, engine, weights, placement, identity=identity)


def two_gpus(draft: str | None = None, **settings: Any) -> Engine:
    """A rank on each of two GPUs; ``draft`` as of ``one_stream``."""
    if draft is not None:
        settings = {**settings, "draft": draft, "draft_weights": str(DRAFTS[draft])}
    return load(gpus=RANKS, parallel="tensor", **settings)


def lock_step(engine: Engine, tokens: int) -> LockStep:
    """The step of all ranks for this many tokens."""
    assert isinstance(engine.steps, RecordedSteps)
    step = engine.steps.step(tokens)
    assert isinstance(step, LockStep)
    return step


def decoded(engine: Engine, token_ids: Sequence[int]) -> Tensor:
    """Logits of an eager step, on the host, which all ranks have alike."""
    found = engine.decode(token_ids).cpu()
    for rank, step in enumerate(lock_step(engine, len(token_ids)).ranks):
        assert torch.equal(bits(step.logits_TV.cpu()), bits(found)), f"rank {rank}"
    return found


def mixed_steps(engine: Engine) -> list[Tensor]:
    """Logits of a prompt in two chunks, of steps of 1 to 8 tokens behind it, and of steps behind
    tokens that are taken back. They cross windows of 4 and of 128 tokens.
    """
    engine.reset()
    rows = [engine.prefill(IDS[:60]).cpu(), engine.prefill(IDS[60:110]).cpu()]
    position = 110
    for tokens in range(1, 9):
        rows.append(decoded(engine, IDS[position : position + tokens]))
        position += tokens
    engine.rewind(8)
    rows.append(decoded(engine, IDS[200:203]))
    engine.rewind(2)
    rows += [decoded(engine, [token]) for token in IDS[201:207]]
    return rows


def caches(engine: Engine, rank: int) -> dict[str, Tensor]:
    """Bytes of every row that a later step of a rank can read, on the host."""
    state = engine.state
    rows = filled_rows(state.ranks[rank].layers, state.position, state.undoable_tokens)
    return {
        f"{one.name} part {index}": part.cpu().contiguous().view(torch.uint8)
        for one in rows
        for index, part in enumerate(one.parts())
    }


def different_caches(engine: Engine, expected: Engine) -> list[str]:
    """Names of the rows of any rank that are not, bit for bit, those of ``expected``'s rank 0."""
    wanted = caches(expected, 0)
    found = []
    for rank in range(len(engine.state.ranks)):
        own = caches(engine, rank)
        assert own.keys() == wanted.keys()
        found += [
            f"rank {rank} {name}" for name, rows in own.items() if not rows.equal(wanted[name])
        ]
    return found


def bits(tensor: Tensor) -> Tensor:
    """float32 as integers, so that NaN equals itself and 0 is not −0."""
    return tensor.contiguous().view(torch.int32)


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(bits(one), bits(other)) for one, other in pairs)


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, whose context a fault may take along."""
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
        check=False,
    )
