"""One saved transformers model for the tests of known faults: parity holds, and fails once the
fault is put in.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from dsv4 import Engine, EngineConfig
from dsv4.ops import TORCH, Ops
from tests.model.oracle import oracle_trace, random_oracle, relative_error
from tests.model.tiny import direct, random_ids, raw_config

PARITY_BOUND = 5e-5


@dataclass(frozen=True)
class SavedOracle:
    """A checkpoint folder of random weights, a prompt and transformers' logits for it."""

    folder: Path
    token_ids: list[int]
    logits_TV: Tensor

    def engine(self, ops: Ops = TORCH) -> Engine:
        config = EngineConfig(
            device="cpu", kv_dtype="bf16", compute_dtype="float32", max_context=1024
        )
        return Engine.load(self.folder, config, change_table=lambda _: direct(ops))

    def errors(self, ops: Ops = TORCH, count: int | None = None) -> list[float]:
        """Error of the logits at every position, relative to the largest logit; after ``count``
        tokens if given.
        """
        reference = self.logits_TV[:count]
        found = self.engine(ops).logits(self.token_ids[:count])
        return ((found - reference).abs().amax(-1) / reference.abs().max()).tolist()

    def agrees(self, ops: Ops = TORCH) -> bool:
        """Whether our logits are those of transformers."""
        return max(self.errors(ops)) <= PARITY_BOUND

    def clearly_differs(self, ops: Ops = TORCH) -> bool:
        """Whether a fault moves the logits by much more than rounding."""
        return not max(self.errors(ops)) <= 10 * PARITY_BOUND


@pytest.fixture(scope="session")
def saved_oracle(tmp_path_factory: pytest.TempPathFactory) -> SavedOracle:
    """Every layer kind, both routers, 150 tokens: a CSA selection that leaves entries out and one
    HCA entry.
    """
    raw = raw_config((0, 4, 128), 1)
    oracle = random_oracle(raw)
    folder = tmp_path_factory.mktemp("oracle")
    token_ids = random_ids(150)
    oracle.save_pretrained(folder)
    logits_TV = oracle_trace(oracle, token_ids)["logits"]
    saved = SavedOracle(folder, token_ids, logits_TV)
    assert relative_error(saved.engine().logits(token_ids), logits_TV) <= PARITY_BOUND
    return saved
