"""The comparison of activation modes: what it counts, its bars, and a run of it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.demo.training.activation_modes import ModeResult, main, table
from dsv4.engine_config import ActivationMode

ANSWER = torch.tensor([2, 0])


def trace(logits: Tensor) -> dict[str, Any]:
    return {"layers": [logits + 1], "final": logits, "logits": logits}


def result(logits: Tensor, reference: Tensor, mode: ActivationMode = "fp8") -> ModeResult:
    found = ModeResult(mode, ["SWA"])
    found.add(trace(logits), trace(reference), ANSWER)
    return found


def certain(*tokens: int) -> Tensor:
    """Logits that give each of these tokens, of three, e^4 times the others' probability."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), 3) * 4.0


def test_the_loss_is_that_of_the_answer_alone() -> None:
    right = certain(1, 2, 0, 1)
    found = result(right, right)
    assert math.isclose(found.loss, math.log(1 + 2 * math.exp(-4)), rel_tol=1e-6)
    assert (found.examples, found.exact, found.answer_tokens, found.tokens) == (1, 1, 2, 4)
    other_prompt = result(certain(0, 2, 0, 2), right)
    assert other_prompt.loss == found.loss
    assert (other_prompt.exact, other_prompt.same_argmax) == (1, 2)
    wrong = result(certain(1, 2, 1, 1), right)
    assert wrong.exact == 0
    assert wrong.loss > found.loss


def test_bars() -> None:
    right = certain(1, 2, 0, 1)
    reference = result(right, right, "bf16")
    assert reference.passes(reference)
    noisy = right.clone()
    noisy[0] += torch.tensor([0.35, 0.0, -0.35])
    cosine = float(torch.cosine_similarity(noisy.flatten(), right.flatten(), 0))
    assert 0.997 < cosine < 0.999
    assert not result(noisy, right, "fp8").passes(reference)
    assert result(noisy, right, "nvfp4").passes(reference)
    unsure = 0.97 * right
    assert not result(unsure, right, "nvfp4").passes(reference)
    assert "| fp8 | 0.0360 | 1 of 1 | 4 of 4 | 1.00000 | 1.00000 | 1.00000 |" in table(
        [result(right, right)]
    )


@pytest.mark.slow
def test_a_run_compares_all_modes(tmp_path: Path) -> None:
    file = tmp_path / "modes.json"
    # Two examples are too few for the bars.
    main(["--limit", "1", "--task", "capitals", "--task", "tools", "--json", str(file)])
    record = json.loads(file.read_text())
    assert [mode["mode"] for mode in record["modes"]] == ["bf16", "fp8", "nvfp4"]
    bf16, fp8, nvfp4 = ([row["cosine"] for row in mode["rows"]] for mode in record["modes"])
    assert len(bf16) == 8
    assert min(bf16) > 1 - 1e-9
    assert all(a > b for a, b in zip(fp8, nvfp4, strict=True))
    assert max(fp8) < 1
    assert min(nvfp4) > 0.99
