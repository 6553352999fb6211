"""A checkpoint's declarations of its formats (model.md#declarations).

A declaration says which formats a parameter may have; the tensor names must agree (``formats.py``).
``config_groups`` is not read: its ``targets: ["Linear"]`` would claim every linear layer, while
only ``quantized_layers`` are meant.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.names import Dialect, from_native
from dsv4.checkpoint.problems import printable
from dsv4.errors import UserError, shorten
from dsv4.weights.parameters import Parameter, Role
from dsv4.weights.quant import FP8_BLOCK, QuantFormat

Method = Literal["undeclared", "none", "fp8", "nvfp4"]

DENSE = (QuantFormat.BF16, QuantFormat.F32)
_EXCLUDING_KEYS = ("ignore", "exclude_modules", "modules_to_not_convert")
_EXPERT_FORMATS = {"fp4": QuantFormat.MXFP4, "fp8": QuantFormat.FP8_BLOCK128}


class ModulePatterns:
    """Module names, exact or with wildcards, in native or stored names; a name covers everything
    below it.
    """

    def __init__(self, patterns: list[str]) -> None:
        self._exact = {pattern for pattern in patterns if "*" not in pattern}
        self._wildcards = [pattern for pattern in patterns if "*" in pattern]

    def cover(self, module: str) -> bool:
        """Whether a pattern names ``module`` or a module above it."""
        parts = module.split(".")
        above = [".".join(parts[: count + 1]) for count in range(len(parts))]
        if not self._exact.isdisjoint(above):
            return True
        return any(fnmatchcase(name, pattern) for pattern in self._wildcards for name in above)


@dataclass(frozen=True)
class Declaration:
    """``method`` holds for a LINEAR or EXPERT that no list names; ``expert_format`` goes
    with "fp8".

    "undeclared" is a checkpoint without any declaration: the scales that stand beside a weight then
    say what it is.
    """

    method: Method
    expert_format: QuantFormat
    nvfp4: ModulePatterns
    all_main_experts_nvfp4: bool
    excluded: ModulePatterns

    def allowed(self, parameter: Parameter, dialect: Dialect) -> tuple[QuantFormat, ...]:
        """Formats that the declaration admits for a LINEAR, EXPERT or FLOOR parameter, most likely
        first.
        """
        if parameter.role is Role.FLOOR:
            return DENSE
        modules = _module_names(parameter, dialect)
        excluded = any(self.excluded.cover(module) for module in modules)
        if not excluded and self._is_nvfp4(parameter, modules):
            return (QuantFormat.NVFP4,)
        base = self.expert_format if parameter.role is Role.EXPERT else QuantFormat.FP8_BLOCK128
        if self.method == "undeclared":
            return (*DENSE, QuantFormat.NVFP4, base)
        if self.method == "fp8":
            return (base, *DENSE) if excluded else (base,)
        return DENSE

    def _is_nvfp4(self, parameter: Parameter, modules: list[str]) -> bool:
        if self.method == "nvfp4" or any(self.nvfp4.cover(module) for module in modules):
            return True
        return (
            self.all_main_experts_nvfp4
            and parameter.role is Role.EXPERT
            and not parameter.name.startswith("mtp.")
        )


def _module_names(parameter: Parameter, dialect: Dialect) -> list[str]:
    """Names under which a list may mention the module: native and stored, for experts those of
    expert 0.
    """
    name = parameter.name.replace(".experts.", ".experts.0.")
    stored = from_native(name, dialect)
    return [
        form.rpartition(".")[0]
        for form in dict.fromkeys((name, stored, stored.removeprefix("model.")))
    ]


def read_declaration(checkpoint: Checkpoint) -> Declaration:
    """Parses both files. Raises ``UserError`` naming methods, algorithms and sizes that are not
    supported.
    """
    source = f"{checkpoint.folder}/config.json"
    quantization = _section(checkpoint.raw_config, "quantization_config", source)
    separate = _section(
        checkpoint.hf_quant_config or {},
        "quantization",
        f"{checkpoint.folder}/hf_quant_config.json",
    )
    _check_agreement(quantization, separate, f"{source}: quantization_config")
    merged = {**separate, **quantization}
    layers = merged.get("quantized_layers", {})
    excluded = [name for key in _EXCLUDING_KEYS for name in merged.get(key, ())]
    return Declaration(
        method=_method(merged),
        expert_format=_expert_format(checkpoint.raw_config, merged, source),
        nvfp4=ModulePatterns(list(layers)),
        all_main_experts_nvfp4=merged.get("moe_quant_algo") == "NVFP4" and not layers,
        excluded=ModulePatterns(excluded),
    )


def _method(declared: dict[str, Any]) -> Method:
    """What holds for a matrix that no list names."""
    if not declared:
        return "undeclared"
    if declared.get("quant_method") == "fp8":
        return "fp8"
    is_whole = declared.get("quant_algo") == "NVFP4" and not declared.get("quantized_layers")
    return "nvfp4" if is_whole else "none"


def _expert_format(
    raw_config: dict[str, Any], declared: dict[str, Any], source: str
) -> QuantFormat:
    """Of ``expert_dtype``, which transformers also writes into ``quantization_config``; null counts
    as absent.
    """
    moved = declared.get("expert_dtype")
    found = raw_config.get("expert_dtype")
    if found is None:
        found = moved or "fp4"
    if not isinstance(found, str) or found not in _EXPERT_FORMATS:
        raise UserError(
            f"{source}: expert_dtype: found {shorten(found)}, "
            f"expected one of {', '.join(_EXPERT_FORMATS)}"
        )
    if moved not in (None, found):
        raise UserError(
            f"{source}: expert_dtype: found {found!r}, expected {moved!r} as in quantization_config"
        )
    return _EXPERT_FORMATS[found]


def _check_agreement(quantization: dict[str, Any], separate: dict[str, Any], source: str) -> None:
    algorithms = "quant_method", "quant_algo", "moe_quant_algo"
    for key in (*algorithms, "group_size", "expert_dtype", "quantized_layers"):
        if key in quantization and key in separate:
            _check_same(quantization[key], separate[key], f"{source}: {key}")


def _check_same(found: Any, expected: Any, source: str) -> None:
    if found == expected:
        return
    if isinstance(found, dict):
        # A list of all layers is too long to be shown.
        name = next(name for name in (*expected, *found) if found.get(name) != expected.get(name))
        source = f"{source}: {printable(name)}"
        found = found.get(name)
        expected = expected.get(name)
    raise UserError(
        f"{source}: found {shorten(found)}, expected {shorten(expected)} as in hf_quant_config.json"
    )


def _section(raw: dict[str, Any], key: str, source: str) -> dict[str, Any]:
    """The declaration of one file, whose values are known ones; empty where it has none."""
    section = raw.get(key)
    if section is None:
        return {}
    source = f"{source}: {key}"
    if not isinstance(section, dict):
        raise UserError(f"{source}: found {shorten(section)}, expected an object")
    section = {name: value for name, value in section.items() if value is not None}
    method = section.get("quant_method")
    if method not in (None, "fp8", "modelopt"):
        raise UserError(
            f"{source}: quant_method: found {shorten(method)}, expected 'fp8' or 'modelopt' "
            "(not supported)"
        )
    expected = {
        "quant_algo": ("NVFP4", "MIXED_PRECISION"),
        "moe_quant_algo": ("NVFP4",),
        "group_size": (16,),
        "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
        "fmt": ("e4m3",),
        "expert_dtype": tuple(_EXPERT_FORMATS),
    }
    for name, values in expected.items():
        if name in section and section[name] not in values:
            raise UserError(
                f"{source}: {name}: found {shorten(section[name])}, "
                f"expected {' or '.join(map(repr, values))}"
            )
    _check_layers(section.get("quantized_layers", {}), f"{source}: quantized_layers")
    for name in _EXCLUDING_KEYS:
        _check_modules(section.get(name), f"{source}: {name}")
    return section


def _check_layers(layers: Any, source: str) -> None:
    if not isinstance(layers, dict):
        raise UserError(f"{source}: found {shorten(layers)}, expected an object")
    for module, entry in layers.items():
        if (
            not isinstance(entry, dict)
            or entry.get("quant_algo") != "NVFP4"
            or entry.get("group_size") not in (None, 16)
        ):
            raise UserError(
                f"{source}: {shorten(module)}: found {shorten(entry)}, "
                "expected NVFP4 with group_size 16"
            )


def _check_modules(names: Any, source: str) -> None:
    if names is None:
        return
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{source}: found {shorten(names)}, expected a list of module names")
