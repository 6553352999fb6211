"""The layouts that are written: formats of parameters, and what the config declares
(model.md#declarations).
"""

from typing import Any, Literal, get_args

from dsv4.checkpoint.names import Dialect
from dsv4.errors import UserError
from dsv4.weights.parameters import Parameter, Role
from dsv4.weights.quant import FP8_BLOCK, QuantFormat

Layout = Literal["nvfp4-experts", "nvfp4-all", "native", "bf16", "f32"]

_MATRIX_FORMATS = {
    "nvfp4-experts": (QuantFormat.FP8_BLOCK128, QuantFormat.NVFP4),
    "nvfp4-all": (QuantFormat.NVFP4, QuantFormat.NVFP4),
    "native": (QuantFormat.FP8_BLOCK128, QuantFormat.MXFP4),
    "bf16": (QuantFormat.BF16, QuantFormat.BF16),
    "f32": (QuantFormat.F32, QuantFormat.F32),
}
_KEPT_IN_16_BIT = {
    Dialect.NATIVE: [
        "embed",
        "head",
        "*.ffn.gate",
        "*.compressor.wkv",
        "*.compressor.wgate",
        "*.weights_proj",
    ],
    Dialect.HF: [
        "model.embed_tokens",
        "lm_head",
        "*.mlp.gate",
        "*.compressor.kv_proj",
        "*.compressor.gate_proj",
        "*.indexer.kv_proj",
        "*.indexer.gate_proj",
        "*.weights_proj",
    ],
}
_NOT_NVFP4 = {
    Dialect.NATIVE: ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
    Dialect.HF: ["*.self_attn.*", "*.mlp.shared_experts.*", "lm_head", "mtp.*"],
}


def check_layout(layout: str) -> None:
    """Raises ``UserError`` for anything but a ``Layout``."""
    if layout not in get_args(Layout):
        raise UserError(
            f"checkpoint format: found {layout!r}, expected one of {', '.join(get_args(Layout))}"
        )


def format_in(layout: Layout, parameter: Parameter) -> QuantFormat | None:
    """Format of a matrix in ``layout``; None for NORM, FLOAT and TABLE.

    FLOOR stays 16 bit. The routed experts of ``mtp`` stay MXFP4 in "nvfp4-experts", as in NVIDIA's
    exports.
    """
    if parameter.role is Role.FLOOR:
        return QuantFormat.F32 if layout == "f32" else QuantFormat.BF16
    linear, expert = _MATRIX_FORMATS[layout]
    if parameter.role is Role.EXPERT:
        stays = layout == "nvfp4-experts" and parameter.name.startswith("mtp.")
        return QuantFormat.MXFP4 if stays else expert
    return linear if parameter.role is Role.LINEAR else None


def declare(
    raw_config: dict[str, Any], layout: Layout, dialect: Dialect, layers: int
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """``config.json`` and ``hf_quant_config.json`` (None: not written) that go with ``layout`` in
    ``dialect``.
    """
    names = Dialect.HF if dialect is Dialect.HF else Dialect.NATIVE
    config = {
        key: value
        for key, value in raw_config.items()
        if key not in ("quantization_config", "expert_dtype")
    }
    if layout in ("bf16", "f32"):
        return config, None
    if layout == "nvfp4-all":
        declared = _modelopt("NVFP4", "dsv4-nvfp4-all", _KEPT_IN_16_BIT[names])
        config["quantization_config"] = {"quant_method": "modelopt", **declared}
        return config, _separate(declared)
    config["expert_dtype"] = "fp4"
    fp8 = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
    if layout == "native":
        config["quantization_config"] = fp8
        return config, None
    prefix, suffix = (
        ("model.layers", "mlp.experts") if names is Dialect.HF else ("layers", "ffn.experts")
    )
    modules = [f"{prefix}.{layer}.{suffix}" for layer in range(layers)]
    declared = _modelopt("MIXED_PRECISION", "dsv4-nvfp4-experts", _NOT_NVFP4[names])
    declared["moe_quant_algo"] = "NVFP4"
    declared["quantized_layers"] = {
        name: {"quant_algo": "NVFP4", "group_size": 16} for name in modules
    }
    config["quantization_config"] = {**fp8, **declared}
    return config, _separate(declared)


def _modelopt(algorithm: str, version: str, ignore: list[str]) -> dict[str, Any]:
    nvfp4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    return {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "producer": {"name": "modelopt", "version": version},
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": nvfp4, "input_activations": nvfp4}
        },
        "ignore": ignore,
    }


def _separate(declared: dict[str, Any]) -> dict[str, Any]:
    quantization = {
        key: declared[key] for key in ("quant_algo", "kv_cache_quant_algo", "group_size")
    }
    if "quantized_layers" in declared:
        quantization["quantized_layers"] = declared["quantized_layers"]
    quantization["exclude_modules"] = declared["ignore"]
    return {"producer": declared["producer"], "quantization": quantization}
