"""What layouts say of the tensors that are written, without writing them."""

import pytest

from dsv4.checkpoint import Dialect, Layout, tiny_config
from dsv4.checkpoint.layouts import declare, format_in
from dsv4.checkpoint.names import from_native
from dsv4.config import ModelConfig
from dsv4.weights.parameters import Role, parameters
from dsv4.weights.quant import QuantFormat

CONFIG = tiny_config()
PARAMETERS = parameters(ModelConfig.from_dict(CONFIG), "classic").values()
MATRICES = (Role.LINEAR, Role.EXPERT, Role.FLOOR)


@pytest.mark.parametrize(
    ("layout", "format"), [("bf16", QuantFormat.BF16), ("f32", QuantFormat.F32)]
)
def test_every_matrix_of_an_unquantised_layout_has_its_one_format(
    layout: Layout, format: QuantFormat
) -> None:
    formats = {format_in(layout, one) for one in PARAMETERS if one.role in MATRICES}
    assert formats == {format}


@pytest.mark.parametrize("dialect", [Dialect.NATIVE, Dialect.HF])
def test_listed_modules_have_the_names_of_the_tensors_below_them(dialect: Dialect) -> None:
    config, separate = declare(CONFIG, "nvfp4-experts", dialect, CONFIG["num_hidden_layers"])
    listed = config["quantization_config"]["quantized_layers"]
    experts = [
        from_native(one.name.replace(".experts.", ".experts.0."), dialect)
        for one in PARAMETERS
        if one.role is Role.EXPERT and not one.name.startswith("mtp.")
    ]
    assert {name.rpartition(".0.")[0] for name in experts} == set(listed)
    assert separate is not None
    assert separate["quantization"]["quantized_layers"] == listed
