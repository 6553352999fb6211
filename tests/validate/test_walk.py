"""What both sides of a walk read: the streams behind the layer before, in which steps."""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.ops import TORCH
from dsv4.validate import layer_flags
from dsv4.validate.layer_flags import make_walk, parse
from dsv4.validate.layer_walk import Computed
from dsv4.validate.one_layer import Given, Values
from tests.model.tiny import direct


def wrong_in_short_steps(q_THD: Tensor, *given: Any) -> Tensor:
    heads_THD = TORCH.sparse_attention(q_THD, *given)
    return heads_THD if len(q_THD) > 8 else -heads_THD


def test_a_fault_of_short_steps_is_found_though_the_reference_has_it_too(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = replace(TORCH, sparse_attention=wrong_in_short_steps)
    monkeypatch.setattr(layer_flags, "table_on", lambda *_: direct(faulty))
    monkeypatch.setattr(layer_flags, "torch_table", lambda _: direct(faulty))
    flags = ["--device", "cpu", "--model", str(model), "--layers", "0", "--tokens", "16"]
    options = parse([*flags, "--chunk", "8", "--chunk", "16"], None)
    with ExitStack() as stack:
        short, whole = make_walk(options, stack)
    assert next(row.name for row in short.rows if not row.passes) == "layers.0.attn.heads"
    assert all(row.passes for row in whole.rows)


@dataclass
class Multiplied:
    """Its streams are those of this engine times the tokens per step; keeps what it is given."""

    given: list[Tensor] = field(default_factory=list)
    left: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def choices(self, layer: int) -> Values:
        return {}

    def run(self, layer: int, given: Given, found: Values, chunk: int) -> Computed:
        name = f"layers.{layer}.streams"
        self.given.append(given.streams_TME)
        self.left.append((found[name], chunk * found[name]))
        return Computed({name: self.left[-1][1]}, {})


@pytest.mark.parametrize(("read", "side"), [("own", 0), ("reference", 1)])
def test_a_layer_reads_what_the_last_steps_of_the_asked_side_left(
    model: Path, read: str, side: int
) -> None:
    flags = ["--device", "cpu", "--model", str(model), "--layers", "0:2", "--tokens", "8"]
    options = parse([*flags, "--chunk", "4", "--chunk", "8", "--input", read], None)
    reference = Multiplied()
    with ExitStack() as stack:
        results = [*replace(make_walk(options, stack), reference=reference)]
    assert [(result.layer, result.chunk) for result in results] == [(0, 4), (0, 8), (1, 4), (1, 8)]
    for given in reference.given[2:]:
        assert torch.equal(given, reference.left[1][side])
