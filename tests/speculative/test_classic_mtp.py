"""Classic MTP against transformers' modules: its block is a model of one window layer there, whose
input is put together here; position by position, with further drafts, after rewinds.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, ModelConfig
from dsv4.checkpoint import load_weights, open_checkpoint
from dsv4.layers.weights import Weights
from dsv4.speculative.drafter import Proposal
from tests.model.oracle import random_oracle
from tests.model.tiny import CPU, random_ids, small_config
from tests.speculative.formula import float64_values, rms_norm
from tests.speculative.models import WINDOW, assert_near, drafted_config, drafted_weights, engine_of

DRAFTS = 4
POSITIONS = [1, 2, 3, 4, 15, 16, 17, 18, 21, 32, 47]


class TransformersMTP:
    """A model of one layer whose streams are given."""

    def __init__(self, folder: Path) -> None:
        raw = small_config((0,), 0, sliding_window=WINDOW)
        self.model: Any = random_oracle(raw, seed=5)
        self.model.save_pretrained(folder)
        config = ModelConfig.from_dict(raw)
        self.weights: Weights = {
            **load_weights(open_checkpoint(folder), config, device_of=lambda _: CPU)
        }
        self.streams: Tensor | None = None
        layer = self.model.model.layers[0]
        layer.register_forward_pre_hook(self._replace, with_kwargs=True)
        layer.register_forward_hook(self._keep)

    def _replace(self, _: Any, inputs: Any, named: Any) -> tuple[Any, Any]:
        return (self.streams, *inputs[1:]), named

    def _keep(self, _: Any, inputs: Any, output: Tensor) -> None:
        self.behind = output

    @torch.inference_mode()
    def run(self, streams_TME: Tensor) -> tuple[Tensor, Tensor]:
        """The streams behind the layer and the logits, of all rows."""
        self.streams = streams_TME.float()[None]
        ids = torch.zeros((1, streams_TME.shape[0]), dtype=torch.int64)
        logits = self.model(ids, use_cache=False).logits[0]
        return self.behind[0], logits


class Reference:
    """Greedy drafts by the definition: rows of the sequence, then rows of the block's own."""

    def __init__(self, folder: Path) -> None:
        self.config = drafted_config("classic")
        self.oracle = TransformersMTP(folder)
        weights = {**drafted_weights(self.config, "classic")}
        for name, weight in self.oracle.weights.items():
            if name.startswith(("layers.0.", "hc_head", "norm")):
                weights[f"mtp.0.{name.removeprefix('layers.0.')}"] = weight
        weights["head.weight"] = self.oracle.weights["head.weight"]
        self.weights = weights
        self.values = float64_values(weights)

    def row(self, token: int, streams_ME: Tensor, position: int) -> Tensor:
        """The input of the block: streams ``[M, E]``."""
        eps = self.config.rms_norm_eps
        e = rms_norm(self.values["embed.weight"][token], self.values["mtp.0.enorm.weight"], eps)
        x = rms_norm(streams_ME.double(), self.values["mtp.0.hnorm.weight"], eps)
        from_token = self.values["mtp.0.e_proj.weight"] @ e if position else 0.0
        return from_token + x @ self.values["mtp.0.h_proj.weight"].T

    def drafts(self, streams_TME: Tensor, ids: list[int]) -> list[Tensor]:
        """Logits of each draft behind ``ids``, one more than there are streams."""
        rows = [
            self.row(token, streams, position)
            for position, (streams, token) in enumerate(zip(streams_TME, ids[1:], strict=True))
        ]
        found = []
        for _ in range(DRAFTS):
            behind, logits = self.oracle.run(torch.stack(rows))
            found.append(logits[-1])
            rows.append(self.row(int(logits[-1].argmax()), behind[-1], len(rows)))
        return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("oracle") / "mtp")


@pytest.fixture
def engine(reference: Reference) -> Engine:
    return engine_of(reference.config, reference.weights)


@pytest.fixture(scope="module")
def streams(reference: Reference) -> Tensor:
    name = f"layers.{reference.config.num_hidden_layers - 1}.streams"
    return engine_of(reference.config, reference.weights).trace(random_ids(64), [name])[name]


@torch.inference_mode()
def drafts_of(engine: Engine, token: int) -> Proposal:
    def largest(logits_V: Tensor, position: int) -> Tensor:
        return logits_V.argmax()

    drafter = engine.steps.drafter  # pyright: ignore[reportAttributeAccessIssue]
    return drafter.propose(token, engine.position, DRAFTS, largest)


def check(engine: Engine, reference: Reference, streams: Tensor, token: int) -> None:
    position = engine.position
    expected = reference.drafts(streams[:position], [*random_ids(64)[:position], token])
    found = drafts_of(engine, token)
    assert_near(found.logits_NV, torch.stack(expected))


@pytest.mark.slow
def test_drafts_are_those_of_transformers_modules_at_every_position(
    engine: Engine, reference: Reference, streams: Tensor
) -> None:
    ids = random_ids(64)
    for position in POSITIONS:
        engine.reset()
        engine.prefill(ids[:position])
        check(engine, reference, streams, ids[position])


@pytest.mark.parametrize("chunk", [1, 2, 16])
def test_the_last_row_of_a_chunk_waits_for_the_next_token(
    chunk: int, reference: Reference, streams: Tensor
) -> None:
    engine = engine_of(reference.config, reference.weights, prefill_chunk=chunk)
    ids = random_ids(64)
    engine.prefill(ids[:37])
    check(engine, reference, streams, ids[37])


@pytest.mark.parametrize("position", [1, 14, 30])
def test_rejected_drafts_and_rewinds_change_no_draft(
    position: int, engine: Engine, reference: Reference, streams: Tensor
) -> None:
    ids = random_ids(64)
    engine.prefill(ids[:position])
    for step in range(2):
        drafts_of(engine, ids[engine.position])
        wrong = random_ids(6, seed=step + 1)
        engine.decode([*ids[engine.position : engine.position + 2], *wrong])
        engine.rewind(6)
        # Another token than that of the sequence may come behind a row that was already run.
        check(engine, reference, streams, 88)
        check(engine, reference, streams, ids[engine.position])
    engine.rewind(3)
    check(engine, reference, streams, ids[engine.position])


def test_the_longest_rewind_behind_a_long_prompt_finds_its_window(
    engine: Engine, reference: Reference, streams: Tensor
) -> None:
    ids = random_ids(64)
    engine.reset()
    engine.prefill(ids[:56])
    for tokens in (8, 3):
        engine.rewind(tokens)
    check(engine, reference, streams, ids[45])


def test_long_prompts_leave_the_rows_of_their_end(engine: Engine, reference: Reference) -> None:
    """More tokens at once than the ring has slots."""
    ids = random_ids(200, seed=3)
    name = f"layers.{reference.config.num_hidden_layers - 1}.streams"
    found = engine.trace(ids, [name])[name]
    expected = reference.drafts(found, [*ids, 7])
    assert_near(drafts_of(engine, 7).logits_NV, torch.stack(expected))
