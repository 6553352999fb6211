"""cvt: from one number format to another."""

from typing import Any

import numpy as np

from tests.ptx import floats, tensor_core
from tests.ptx.faults import Unsupported
from tests.ptx.operands import Layout
from tests.ptx.rows import DTYPES, Array
from tests.ptx.scalar import Build, Handler, Values, apply
from tests.ptx.syntax import Instruction

_ROUNDINGS: dict[str, Any] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def _convert(instruction: Instruction, layout: Layout) -> Handler:
    to, source = instruction.parts[-2:]
    function = _packed(instruction, to, source) or _single(instruction, to, source)
    if function is None:
        raise Unsupported(instruction.text)
    return apply(function, instruction, layout, source, to)


def _single(instruction: Instruction, to: str, source: str) -> Values | None:
    if source == "bf16" and to == "f32":
        return floats.bf16_values
    if to == "bf16" and source == "f32" and "satfinite" not in instruction.parts:
        return _to_bf16("rz" in instruction.parts)
    if {to, source} & {"bf16", "tf32"} or to not in DTYPES or source not in DTYPES:
        return None
    dtype = np.dtype(DTYPES[to])
    if np.dtype(DTYPES[source]).kind == "f" and dtype.kind != "f":
        return _to_integer(instruction, dtype)
    if instruction.parts[1] in _ROUNDINGS:
        return _to_whole(_ROUNDINGS[instruction.parts[1]], dtype)
    if instruction.parts == ("cvt", "sat", "f32", "f32"):
        return _saturated
    known = {"cvt", "rn", "ftz", to, source}
    if set(instruction.parts) - known:
        return None
    return _cast(dtype)


def _to_bf16(towards_zero: bool) -> Values:
    def converted(x: Array) -> Array:
        return floats.bf16_bits(x, towards_zero)

    return converted


def _saturated(x: Array) -> Array:
    """In [0, 1]; NaN becomes 0."""
    return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0))


def _cast(dtype: Any) -> Values:
    def converted(x: Array) -> Array:
        return x.astype(dtype)

    return converted


def _to_whole(rounding: Any, dtype: Any) -> Values:
    def converted(x: Array) -> Array:
        return rounding(x).astype(dtype)

    return converted


def _to_integer(instruction: Instruction, dtype: Any) -> Values:
    """Rounded and limited to the range; NaN becomes 0."""
    rounding = _ROUNDINGS[instruction.parts[1]]
    limits = np.iinfo(dtype)

    def converted(x: Array) -> Array:
        whole = rounding(np.nan_to_num(x.astype(np.float64), nan=0.0))
        low = whole <= float(limits.min)
        high = whole >= float(limits.max)
        inside = np.where(low | high, 0, whole).astype(dtype)
        return np.where(high, limits.max, np.where(low, limits.min, inside)).astype(dtype)

    return converted


def _packed(instruction: Instruction, to: str, source: str) -> Values | None:
    """Two numbers in a register: of two operands, the first becomes the upper one."""
    if source == "f32" and to in _PACK:
        return _PACK[to](instruction)
    return _UNPACK.get((to, source))


def _both(codes: Values, bits: int, dtype: Any) -> Values:
    def converted(high: Array, low: Array) -> Array:
        return (codes(low).astype(dtype) | codes(high).astype(dtype) << dtype(bits)).astype(dtype)

    return converted


def _pack_bf16x2(instruction: Instruction) -> Values:
    return _both(_maybe_relu(instruction, _to_bf16("rz" in instruction.parts)), 16, np.uint32)


def _maybe_relu(instruction: Instruction, codes: Values) -> Values:
    if "relu" in instruction.parts or "satfinite" in instruction.parts:
        raise Unsupported(instruction.text)
    return codes


def _pack_f16x2(instruction: Instruction) -> Values:
    return _both(_maybe_relu(instruction, _f16_bits), 16, np.uint32)


def _f16_bits(x: Array) -> Array:
    return x.astype(np.float16).view(np.uint16)


def _pack_e4m3x2(instruction: Instruction) -> Values:
    return _both(floats.e4m3_codes, 8, np.uint16)


def _pack_e2m1x2(instruction: Instruction) -> Values:
    return _both(floats.e2m1_codes, 4, np.uint8)


def _pack_ue8m0x2(instruction: Instruction) -> Values:
    upwards = "rp" in instruction.parts

    def codes(x: Array) -> Array:
        return floats.e8m0_codes(x, upwards)

    return _both(codes, 8, np.uint16)


def _f16x2(low: Array, high: Array) -> Array:
    halves = np.stack((low, high), -1).astype(np.float16)
    return halves.view(np.uint32)[:, 0]


def _e4m3x2_to_f16x2(x: Array) -> Array:
    return _f16x2(tensor_core.E4M3[x & 255], tensor_core.E4M3[x >> 8])


def _e2m1x2_to_f16x2(x: Array) -> Array:
    return _f16x2(tensor_core.E2M1[x & 15], tensor_core.E2M1[x >> 4])


def _ue8m0x2_to_bf16x2(x: Array) -> Array:
    values = tensor_core.E8M0[np.stack((x & 255, x >> 8), -1)]
    return floats.bf16_bits(values).view(np.uint32)[:, 0]


def _looked_up(function: Values, bits: int) -> Values:
    """A function of so many bits by the table of all of its values."""
    table = function(np.arange(1 << bits))
    return lambda x: table[x]


_PACK: dict[str, Any] = {
    "bf16x2": _pack_bf16x2,
    "f16x2": _pack_f16x2,
    "e4m3x2": _pack_e4m3x2,
    "e2m1x2": _pack_e2m1x2,
    "ue8m0x2": _pack_ue8m0x2,
}
_UNPACK: dict[tuple[str, str], Values] = {
    ("f16x2", "e4m3x2"): _looked_up(_e4m3x2_to_f16x2, 16),
    ("f16x2", "e2m1x2"): _looked_up(_e2m1x2_to_f16x2, 8),
    ("bf16x2", "ue8m0x2"): _looked_up(_ue8m0x2_to_bf16x2, 16),
}

BUILDS: dict[str, Build] = {"cvt": _convert}
