"""The torch reference reads all tokens in one step, whatever the steps of this engine."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dsv4.ops import TORCH
from dsv4.validate import followed_choices, layer_flags
from dsv4.validate.layer_flags import make_walk, parse
from tests.model.tiny import direct


def wrong_in_short_steps(q_THD: Tensor, *given: Any) -> Tensor:
    heads_THD = TORCH.sparse_attention(q_THD, *given)
    return heads_THD if len(q_THD) > 8 else -heads_THD


def test_a_fault_of_short_steps_is_found_though_the_reference_has_it_too(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = replace(TORCH, sparse_attention=wrong_in_short_steps)
    monkeypatch.setattr(layer_flags, "table_on", lambda *_: direct(faulty))
    monkeypatch.setattr(followed_choices, "TORCH", faulty)
    flags = ["--device", "cpu", "--model", str(model), "--layers", "0", "--tokens", "16"]
    options = parse([*flags, "--chunk", "8", "--chunk", "16"], None)
    with ExitStack() as stack:
        short, whole = make_walk(options, stack)
    assert next(row.name for row in short.rows if not row.passes) == "layers.0.attn.heads"
    assert all(row.passes for row in whole.rows)
