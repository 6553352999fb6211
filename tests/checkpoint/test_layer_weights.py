"""Layers one at a time, of a checkpoint and drawn."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint import Layout, load_weights, open_checkpoint, tiny_config, write_synthetic
from dsv4.checkpoint.layer_weights import LayerSource, LayerWeights, RandomLayers, StoredLayers
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.weights.on_demand import WeightOnDemand
from dsv4.weights.parameters import parameters
from dsv4.weights.quant import QuantTensor

CPU = torch.device("cpu")
LAYOUTS: list[Layout] = ["nvfp4-experts", "native", "bf16"]


def drawn(layout: Layout, seed: int = 0) -> RandomLayers:
    return RandomLayers(tiny_config(), layout, seed, CPU)


def values(weight: QuantTensor | WeightOnDemand | Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def assert_same_experts(source: LayerSource, whole: LayerWeights) -> None:
    """Each expert read alone is that of the stack, and nothing but experts is left unread."""
    on_demand = source.weights(1, CPU, on_demand=True)
    assert on_demand.keys() == whole.keys()
    for name, weight in on_demand.items():
        assert isinstance(weight, WeightOnDemand) == (".experts." in name), name
        if isinstance(weight, WeightOnDemand):
            stack = whole[name]
            assert isinstance(stack, QuantTensor)
            assert (weight.shape, weight.nbytes) == (stack.shape, stack.nbytes)
            for expert in range(stack.shape[0]):
                assert torch.equal(weight[expert].dequantize(), stack[expert].dequantize())
        else:
            assert torch.equal(values(weight), values(whole[name]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_expert_read_alone_is_that_of_the_stack(layout: Layout, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_synthetic(folder, tiny_config(), layout, 0)
    source = StoredLayers(folder)
    checkpoint = open_checkpoint(folder)
    config = ModelConfig.from_dict(checkpoint.raw_config)
    everything = load_weights(checkpoint, config, device_of=lambda _: CPU)
    layer = source.weights(1, CPU, on_demand=False)
    assert layer.keys() == {name for name in everything if name.startswith("layers.1.")}
    for name, weight in layer.items():
        assert torch.equal(values(weight), values(everything[name]))
    assert_same_experts(source, layer)
    rows_TE = source.embedding([5, 0, 5])
    table = everything["embed.weight"]
    assert isinstance(table, QuantTensor)
    assert torch.equal(rows_TE, table.data[[5, 0, 5]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drawn_experts_do_not_depend_on_what_else_is_drawn(layout: Layout) -> None:
    layer = drawn(layout).weights(1, CPU, on_demand=False)
    every = parameters(ModelConfig.from_dict(tiny_config()))
    assert layer.keys() == {name for name in every if name.startswith("layers.1.")}
    assert_same_experts(drawn(layout), layer)
    stack = layer["layers.1.ffn.experts.w1.weight"]
    assert isinstance(stack, QuantTensor)
    assert not torch.equal(stack[0].dequantize(), stack[1].dequantize())
    assert 0.5 < float(stack.dequantize().std()) * stack.shape[-1] ** 0.5 < 2
    other = drawn(layout, seed=1).weights(1, CPU, on_demand=False)
    assert not torch.equal(values(other["layers.1.ffn.experts.w1.weight"]), stack.dequantize())


def test_a_token_has_the_same_row_wherever_it_stands() -> None:
    rows_TE = drawn("bf16").embedding([7, 3, 7])
    assert rows_TE.shape == (3, 128)
    assert torch.equal(rows_TE[0], rows_TE[2])
    assert not torch.equal(rows_TE[0], rows_TE[1])


@pytest.mark.parametrize(("layout", "multiple"), [("nvfp4-experts", 16), ("native", 32)])
def test_a_width_that_a_format_cannot_hold_is_named(
    layout: Layout, multiple: int, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        write_synthetic(tmp_path / "tiny", tiny_config(moe_intermediate_size=40), layout, 0)
    name = "layers.0.ffn.experts.w2.weight"
    expected = f"found K = 40, expected a multiple of {multiple} for "
    assert str(caught.value).startswith(f"{name}: shape: {expected}")
    assert not list(tmp_path.iterdir())
