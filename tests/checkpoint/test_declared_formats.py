"""What a declaration admits for a parameter, without any tensor."""

from pathlib import Path
from typing import Any

import pytest

from dsv4.checkpoint import Dialect, open_checkpoint, tiny_config
from dsv4.checkpoint.declarations import (
    DENSE,
    Declaration,
    Method,
    ModulePatterns,
    read_declaration,
)
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.weights.parameters import parameters
from dsv4.weights.quant import QuantFormat
from tests.checkpoint.folders import changed_copy

PARAMETERS = parameters(ModelConfig.from_dict(tiny_config()), "classic")
LINEAR = "layers.1.attn.wq_a.weight"
EXPERTS = "layers.1.ffn.experts.w1.weight"
FP8 = QuantFormat.FP8_BLOCK128
MXFP4 = QuantFormat.MXFP4
NVFP4 = QuantFormat.NVFP4


def declaration(
    method: Method, nvfp4: tuple[str, ...] = (), excluded: tuple[str, ...] = ()
) -> Declaration:
    return Declaration(method, MXFP4, ModulePatterns([*nvfp4]), False, ModulePatterns([*excluded]))


@pytest.mark.parametrize(
    ("method", "of_linear", "of_experts"),
    [
        ("fp8", (FP8,), (MXFP4,)),
        ("nvfp4", (NVFP4,), (NVFP4,)),
        ("none", DENSE, DENSE),
        ("undeclared", (*DENSE, NVFP4, FP8), (*DENSE, NVFP4, MXFP4)),
    ],
)
def test_what_holds_for_modules_that_no_list_names(
    method: Method, of_linear: tuple[QuantFormat, ...], of_experts: tuple[QuantFormat, ...]
) -> None:
    declared = declaration(method)
    assert declared.allowed(PARAMETERS[LINEAR], Dialect.NATIVE) == of_linear
    assert declared.allowed(PARAMETERS[EXPERTS], Dialect.NATIVE) == of_experts
    assert declared.allowed(PARAMETERS["head.weight"], Dialect.NATIVE) == DENSE


def test_modules_excluded_from_fp8_may_have_either_form() -> None:
    """What ModelOpt leaves out stays FP8 or MXFP4; what is left out of FP8 is not quantised."""
    declared = declaration("fp8", excluded=("layers.1",))
    assert declared.allowed(PARAMETERS[LINEAR], Dialect.NATIVE) == (FP8, *DENSE)
    assert declared.allowed(PARAMETERS[EXPERTS], Dialect.NATIVE) == (MXFP4, *DENSE)


@pytest.mark.parametrize(
    "pattern",
    [
        "layers.1.attn.wq_a",
        "model.layers.1.self_attn.q_a_proj",
        "layers.1.self_attn.q_a_proj",
        "layers.1.self_attn",
        "*.self_attn",
        "model",
    ],
)
def test_a_list_may_name_a_module_or_one_above_it_in_either_dialect(pattern: str) -> None:
    parameter = PARAMETERS[LINEAR]
    assert declaration("none", (pattern,)).allowed(parameter, Dialect.HF) == (NVFP4,)
    excluding = declaration("nvfp4", excluded=(pattern,))
    assert excluding.allowed(parameter, Dialect.HF) == DENSE
    other = PARAMETERS["mtp.0.e_proj.weight"]
    assert excluding.allowed(other, Dialect.HF) == (NVFP4,)


def test_experts_are_listed_by_the_first_of_them() -> None:
    listed = declaration("none", ("layers.1.ffn.experts.0.w1",))
    assert listed.allowed(PARAMETERS[EXPERTS], Dialect.NATIVE) == (NVFP4,)
    assert listed.allowed(PARAMETERS["layers.1.ffn.experts.w2.weight"], Dialect.NATIVE) == DENSE


LISTED = {"layers.1.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}}


@pytest.mark.parametrize(
    ("declared", "method", "other_experts"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", NVFP4),
        ({"quant_algo": "NVFP4", "quantized_layers": LISTED}, "none", DENSE[0]),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": LISTED}, "none", DENSE[0]),
        ({"quant_method": "fp8", "moe_quant_algo": "NVFP4"}, "fp8", NVFP4),
        ({"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}, "none", NVFP4),
        (
            {"quant_method": "fp8", "moe_quant_algo": "NVFP4", "quantized_layers": LISTED},
            "fp8",
            MXFP4,
        ),
    ],
)
def test_a_list_of_modules_ends_what_holds_for_all_of_them(
    bf16: Path, tmp_path: Path, declared: dict[str, Any], method: Method, other_experts: QuantFormat
) -> None:
    folder = changed_copy(bf16, tmp_path / "x", config={"quantization_config": declared})
    found = read_declaration(open_checkpoint(folder))
    assert found.method == method
    assert found.allowed(PARAMETERS[EXPERTS], Dialect.NATIVE) == (NVFP4,)
    others = PARAMETERS["layers.2.ffn.experts.w1.weight"]
    assert found.allowed(others, Dialect.NATIVE)[0] is other_experts


def test_expert_dtype_may_stand_in_the_declaration_alone(bf16: Path, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "expert_dtype": "fp8"}}
    folder = changed_copy(bf16, tmp_path / "x", config={"expert_dtype": None, **config})
    found = read_declaration(open_checkpoint(folder))
    assert found.allowed(PARAMETERS[EXPERTS], Dialect.NATIVE) == (FP8,)


def test_two_files_that_disagree_on_the_experts_are_refused(bf16: Path, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "expert_dtype": "fp4"}}
    folder = changed_copy(bf16, tmp_path / "x", config=config)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"expert_dtype": "fp8"}}')
    message = "expert_dtype: found 'fp4', expected 'fp8' as in hf_quant_config.json$"
    with pytest.raises(UserError, match=message):
        read_declaration(open_checkpoint(folder))


def test_two_methods_that_contradict_are_refused(native: Path, tmp_path: Path) -> None:
    folder = changed_copy(native, tmp_path / "x")
    separate = folder / "hf_quant_config.json"
    separate.write_text('{"quantization": {"quant_method": "fp8"}}')
    assert read_declaration(open_checkpoint(folder)).method == "fp8"
    separate.write_text('{"quantization": {"quant_method": "modelopt"}}')
    checkpoint = open_checkpoint(folder)
    found = "x/config.json: quantization_config: quant_method: found 'fp8', "
    with pytest.raises(UserError, match=f"{found}expected 'modelopt' as in hf_quant_config.json$"):
        read_declaration(checkpoint)
