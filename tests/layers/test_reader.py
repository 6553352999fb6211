"""Matrices that the layout of an op table cannot hold are refused by their names."""

from collections.abc import Callable

import pytest
import torch

from dsv4.checkpoint import synthetic_weights, tiny_config
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.layers.weights import ReadOnce, WeightReader
from dsv4.ops import Packing
from dsv4.ops.tables import CUDA_PACKING, TORCH_PACKING

CONFIG = ModelConfig.from_dict(tiny_config())
ROWS = ("attn.wq_a.weight", "attn.wkv.weight")


def float32_reader(packing: Packing = CUDA_PACKING, keep: bool = False) -> WeightReader:
    """A layer whose random float32 weights bfloat16 does not hold."""
    weights = synthetic_weights(CONFIG, "f32", 1, lambda _: torch.device("cpu"))
    read_once = ReadOnce(weights, packed={} if keep else None)
    return WeightReader(read_once, packing, "layers.1.")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("read", "names"),
    [
        (lambda reader: reader.matrix("ffn.gate.weight"), "layers.1.ffn.gate.weight"),
        (lambda reader: reader.experts("ffn.experts"), "layers.1.ffn.experts.w1.weight"),
        (
            lambda reader: reader.row_list(ROWS, [None, None]),
            "layers.1.attn.wq_a.weight, layers.1.attn.wkv.weight",
        ),
    ],
)
def test_float32_weights_that_lose_bits_are_named(
    read: Callable[[WeightReader], object], names: str, keep: bool
) -> None:
    with pytest.raises(
        UserError, match=f"^{names}: weight: found an F32 weight, .*EngineConfig.ops='torch' takes"
    ):
        read(float32_reader(keep=keep))


def test_the_torch_ops_take_any_float32_weight() -> None:
    read = float32_reader(TORCH_PACKING).matrix("ffn.gate.weight")
    assert read.dequantize().dtype == torch.float32


def test_progress_is_told_of_all_bytes_as_weights_are_read_and_let_go() -> None:
    told: list[tuple[int, int]] = []
    weights = {"a": torch.zeros(3), "b": torch.zeros(5, dtype=torch.bfloat16)}
    read_once = ReadOnce(weights, lambda done, total: told.append((done, total)))
    assert len(read_once["b"]) == 5
    assert (list(read_once), told) == (["a"], [(10, 22)])
    assert len(read_once["a"]) == 3
    assert (list(read_once), told) == ([], [(10, 22), (22, 22)])
