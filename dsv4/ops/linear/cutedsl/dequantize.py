"""Weight bytes to bf16 A registers of wgmma and ``tcgen05.st``, four per k16 step: what each lane
does with its share of a ``PackedWeight``.

Every function here is exact: E2M1 · E4M3 has six significant bits, E2M1 · 2^e and E4M3 fewer, and
bf16 has eight.
"""

from cutlass import Float32, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_SIGN = 0x80008000
_MAGNITUDE = 0x01C001C0
# bf16 holds an E2M1 code in its lowest exponent bits and highest mantissa bit as code · 2^-126.
_TWO_TO_126 = 0x7E807E80


def dequantize_e2m1(word: Uint32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """The four A registers of one k16 step, each bf16x2, as value · 2^-126; ``word`` is the step's
    32 bits.
    """
    return (
        ((word >> 3) & _MAGNITUDE) | (word & _SIGN),
        (word & _MAGNITUDE) | ((word << 3) & _SIGN),
        ((word << 3) & _MAGNITUDE) | ((word << 1) & _SIGN),
        ((word << 6) & _MAGNITUDE) | ((word << 2) & _SIGN),
    )


def dequantize_nvfp4(word: Uint32, scales: Uint32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """E2M1 · E4M3 · 2^-8: the low two bytes of ``scales`` belong to rows g and g + 8."""
    low, high = nvfp4_scale_pairs(scales)
    r0, r1, r2, r3 = dequantize_e2m1(word)
    return mul_bf16x2(r0, low), mul_bf16x2(r1, high), mul_bf16x2(r2, low), mul_bf16x2(r3, high)


def dequantize_mxfp4(word: Uint32, scales: Uint32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """E2M1 · E8M0: the low two bytes of ``scales`` belong to rows g and g + 8.

    An E8M0 byte is a bf16 exponent field. Scale 2^-127 (byte 0) reads as 0 and the NaN byte as
    infinity.
    """
    low = (scales & 0xFF) * 0x00800080
    high = ((scales >> 8) & 0xFF) * 0x00800080
    one = Uint32(_TWO_TO_126)
    r0, r1, r2, r3 = (mul_bf16x2(register, one) for register in dequantize_e2m1(word))
    return mul_bf16x2(r0, low), mul_bf16x2(r1, high), mul_bf16x2(r2, low), mul_bf16x2(r3, high)


def dequantize_fp8(first: Uint32, second: Uint32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """E4M3 values: the step's eight bytes, two per register."""
    r0, r1, r2, r3 = (e4m3x2_to_bf16x2(pair) for pair in (first, first >> 16, second, second >> 16))
    return r0, r1, r2, r3


@dsl_user_op
def mul_bf16x2(
    a: Uint32, b: Uint32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> Uint32:
    """Two bf16 products in one register."""
    operands = [Uint32(a).ir_value(loc=loc, ip=ip), Uint32(b).ir_value(loc=loc, ip=ip)]
    return Uint32(_assembly(T.i32(), operands, "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", loc, ip))


@dsl_user_op
def e4m3x2_to_bf16x2(
    pair: Uint32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> Uint32:
    """The low two bytes of ``pair`` as bf16x2; there is no direct conversion."""
    code = """{
        .reg .b16 e, h0, h1; .reg .b32 p; .reg .f32 f0, f1;
        cvt.u16.u32 e, $1;
        cvt.rn.f16x2.e4m3x2 p, e;
        mov.b32 {h0, h1}, p;
        cvt.f32.f16 f0, h0;
        cvt.f32.f16 f1, h1;
        cvt.rn.bf16x2.f32 $0, f1, f0;
    }"""
    return Uint32(
        _assembly(T.i32(), [Uint32(pair).ir_value(loc=loc, ip=ip)], code, "=r,r", loc, ip)
    )


@dsl_user_op
def nvfp4_scale_pairs(
    scales: Uint32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> tuple[Uint32, Uint32]:
    """Two E4M3 bytes, each times 2^118 and twice in a bf16x2 register: 2^126 undoes
    ``dequantize_e2m1``, 2^-8 stays.
    """
    code = """{
        .reg .b16 e, h0, h1; .reg .b32 p; .reg .f32 f0, f1;
        cvt.u16.u32 e, $2;
        cvt.rn.f16x2.e4m3x2 p, e;
        mov.b32 {h0, h1}, p;
        cvt.f32.f16 f0, h0;
        cvt.f32.f16 f1, h1;
        mul.f32 f0, f0, 0f7A800000;
        mul.f32 f1, f1, 0f7A800000;
        cvt.rn.bf16x2.f32 $0, f0, f0;
        cvt.rn.bf16x2.f32 $1, f1, f1;
    }"""
    both = llvm.StructType.get_literal([T.i32(), T.i32()])
    result = _assembly(both, [Uint32(scales).ir_value(loc=loc, ip=ip)], code, "=r,=r,r", loc, ip)
    low, high = (llvm.extractvalue(T.i32(), result, [index], loc=loc, ip=ip) for index in (0, 1))
    return Uint32(low), Uint32(high)


@dsl_user_op
def after_wait(
    value: Float32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> Float32:
    """``value``, which the compiler may not use before the statements that precede this.

    It sees no connection between the registers of an MMA or a load in flight and the wait for it.
    """
    operand = Float32(value).ir_value(loc=loc, ip=ip)
    return Float32(_assembly(T.f32(), [operand], "", "=f,0", loc, ip, ordered=True))


def _assembly(
    result: ir.Type,
    operands: list[ir.Value],
    code: str,
    constraints: str,
    loc: ir.Location | None,
    ip: ir.InsertionPoint | None,
    ordered: bool = False,
) -> ir.Value:
    return llvm.inline_asm(
        result,
        operands,
        code,
        constraints,
        has_side_effects=ordered,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
