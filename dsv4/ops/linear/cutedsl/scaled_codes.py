"""Hidden values to FP8 and NVFP4 in registers, bit for bit as ``dsv4.ops.quantize_activations``."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_FP8_SMALLEST_AMAX = 1e-4
_FLOAT_MAX = 3.4028234663852886e38
_NVFP4_GROUP = 16
_E4M3_NAN = 0x7F
_E8M0_NAN = 0xFF
_EVERY_BYTE = 0x01010101


@cute.jit
def quantize_fp8(hidden):
    """128 values that share a scale: 32 words of codes, and the word of their four equal scales."""
    amax = absolute_maximum(hidden, 0, cute.size(hidden))
    is_lost = (amax <= _FLOAT_MAX) == False  # noqa: E712
    share = maximum(amax, Float32(_FP8_SMALLEST_AMAX)) * Float32(1 / _E4M3_MAX)
    bits = float_bits(share)
    scale = (bits >> 23) + Uint32((bits & 0x7FFFFF) != 0)
    inverse = bits_float((254 - scale) << 23)
    words = cute.make_rmem_tensor(cute.size(hidden) // 4, Uint32)
    for i in range_constexpr(cute.size(words)):
        values = [Float32(hidden[4 * i + j]) * inverse for j in range(4)]
        words[i] = e4m3x4(*values)
        if is_lost:
            words[i] = Uint32(_E4M3_NAN * _EVERY_BYTE)
    scales = cute.make_rmem_tensor(1, Uint32)
    scales[0] = scale * _EVERY_BYTE
    if is_lost:
        scales[0] = Uint32(_E8M0_NAN * _EVERY_BYTE)
    return words, scales


@cute.jit
def quantize_nvfp4(hidden, total):
    """Values with a scale for every 16 and the global scale ``total``: words of 8 codes, and of 4
    scales.
    """
    per_total = Float32(1.0) / (Float32(_E2M1_MAX) * total)
    words = cute.make_rmem_tensor(cute.size(hidden) // 8, Uint32)
    scales = cute.make_rmem_tensor(cute.size(hidden) // 64, Uint32)
    scales.fill(Uint32(0))
    for group in range_constexpr(cute.size(hidden) // _NVFP4_GROUP):
        first = const_expr(group * _NVFP4_GROUP)
        amax = absolute_maximum(hidden, first, _NVFP4_GROUP)
        is_lost = (amax <= _FLOAT_MAX) == False  # noqa: E712
        scale = e4m3(minimum(amax * per_total, Float32(_E4M3_MAX)))
        if is_lost:
            scale = Uint32(_E4M3_NAN)
        is_zero = is_lost | (scale == 0)
        inverse = Float32(1.0) / (e4m3_value(scale) * total)
        for half in range_constexpr(2):
            at = const_expr(first + 8 * half)
            values = [Float32(hidden[at + j]) * inverse for j in range(8)]
            words[at // 8] = e2m1x8(*values)
            if is_zero:
                words[at // 8] = Uint32(0)
        scales[group // 4] = scales[group // 4] | (scale << (8 * (group % 4)))
    return words, scales


@cute.jit
def absolute_maximum(values, first, count):
    """The largest magnitude of ``count`` values; NaN if there is one."""
    amax = Float32(0.0)
    for part in range_constexpr(count // _NVFP4_GROUP):
        for i in range_constexpr(_NVFP4_GROUP):
            value = Float32(values[first + part * _NVFP4_GROUP + i])
            amax = maximum(amax, magnitude(value))
    return amax


def maximum(a, b):
    """The larger of two numbers; NaN if one is."""
    return cute.arch.fmax(a, b, nan=True)


def minimum(a, b):
    """The smaller of two numbers; NaN if one is."""
    return cute.arch.fmin(a, b, nan=True)


def magnitude(value):
    """|value|."""
    return bits_float(float_bits(value) & 0x7FFFFFFF)


@dsl_user_op
def float_bits(
    value: Float32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> Uint32:
    """The bits of a float."""
    return Uint32(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def bits_float(
    bits: Uint32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> Float32:
    """The float of these bits."""
    return Float32(llvm.bitcast(T.f32(), Uint32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def e2m1x8(
    v0: Float32,
    v1: Float32,
    v2: Float32,
    v3: Float32,
    v4: Float32,
    v5: Float32,
    v6: Float32,
    v7: Float32,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> Uint32:
    """Eight floats to E2M1, the first in the low nibble; nearest, ties to even, saturating."""
    code = """{
        .reg .b8 c0, c1, c2, c3;
        cvt.rn.satfinite.e2m1x2.f32 c0, $2, $1;
        cvt.rn.satfinite.e2m1x2.f32 c1, $4, $3;
        cvt.rn.satfinite.e2m1x2.f32 c2, $6, $5;
        cvt.rn.satfinite.e2m1x2.f32 c3, $8, $7;
        mov.b32 $0, {c0, c1, c2, c3};
    }"""
    values = (v0, v1, v2, v3, v4, v5, v6, v7)
    return Uint32(_assembly(T.i32(), values, code, "=r,f,f,f,f,f,f,f,f", loc, ip))


@dsl_user_op
def e4m3x4(
    v0: Float32,
    v1: Float32,
    v2: Float32,
    v3: Float32,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> Uint32:
    """Four floats to E4M3, the first in the low byte; nearest, ties to even, saturating."""
    code = """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }"""
    return Uint32(_assembly(T.i32(), (v0, v1, v2, v3), code, "=r,f,f,f,f", loc, ip))


@dsl_user_op
def e4m3(
    value: Float32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> Uint32:
    """The E4M3 code nearest to a float."""
    code = """{
        .reg .b16 both;
        .reg .f32 zero;
        mov.f32 zero, 0f00000000;
        cvt.rn.satfinite.e4m3x2.f32 both, zero, $1;
        cvt.u32.u16 $0, both;
    }"""
    return Uint32(_assembly(T.i32(), (value,), code, "=r,f", loc, ip))


@dsl_user_op
def e4m3_value(
    code: Uint32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> Float32:
    """The value of an E4M3 code."""
    assembly = """{
        .reg .b16 both, low, high;
        .reg .b32 halves;
        cvt.u16.u32 both, $1;
        cvt.rn.f16x2.e4m3x2 halves, both;
        mov.b32 {low, high}, halves;
        cvt.f32.f16 $0, low;
    }"""
    operand = Int32(code)
    return Float32(_assembly(T.f32(), (operand,), assembly, "=f,r", loc, ip))


def _assembly(result, values, code, constraints, loc, ip):
    operands = [value.ir_value(loc=loc, ip=ip) for value in values]
    return llvm.inline_asm(
        result,
        operands,
        code,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
