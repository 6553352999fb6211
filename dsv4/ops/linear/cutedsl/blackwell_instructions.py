"""Instructions of sm_100a and sm_103a that CuTe DSL has no word for, or only one with coordinates
that are whole tiles.
"""

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu, llvm
from cutlass.cute import CopyAtom, Pointer
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def map_address(
    atom: CopyAtom, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> Int64:
    """The address of the tensor map of a TMA atom."""
    pointer = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>")
    executable = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    address = cute_nvgpu.get_tma_desc_addr(pointer, executable, loc=loc, ip=ip)
    return Int64(cute_nvgpu.cast_tma_desc_to_integer(T.i64(), address.value, loc=loc, ip=ip))


@dsl_user_op
def load_box(
    tensor_map: Int64,
    to: Pointer,
    barrier: Pointer,
    coordinates: tuple[Int32, ...],
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> None:
    """The box of a tensor map that begins at these coordinates, by the one thread that is active.

    What lies outside of the tensor reads as zero and counts as bytes all the same.
    """
    rank = len(coordinates)
    place = ", ".join(f"${3 + i}" for i in range(rank))
    code = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[$0], [$1, {{{place}}}], [$2];"
    )
    operands = [_shared(to, loc, ip), Int64(tensor_map), _shared(barrier, loc, ip), *coordinates]
    _emit(operands, code, "r,l,r" + ",r" * rank, loc, ip)


@dsl_user_op
def load_rows(
    tensor_map: Int64,
    to: Pointer,
    barrier: Pointer,
    column: Int32,
    rows: tuple[Int32, Int32, Int32, Int32],
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> None:
    """Four rows of a matrix from ``column`` on, to consecutive rows of shared memory, by every
    active thread.

    A row outside of the matrix reads as zeros.
    """
    code = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4"
        ".mbarrier::complete_tx::bytes [$0], [$1, {$3, $4, $5, $6, $7}], [$2];"
    )
    operands = [_shared(to, loc, ip), Int64(tensor_map), _shared(barrier, loc, ip), column, *rows]
    _emit(operands, code, "r,l,r,r,r,r,r,r", loc, ip)


@dsl_user_op
def store_fragments(
    address: Int32,
    registers: list[Uint32],
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> None:
    """Sixteen registers a lane, the A fragments of 64 columns of 16 rows, to 16 lanes x 32 columns
    of tensor memory.
    """
    places = ", ".join(f"${i}" for i in range(1, 17))
    code = f"tcgen05.st.sync.aligned.16x128b.x8.b32 [$0], {{{places}}};"
    _emit([Int32(address), *registers], code, "r" + ",r" * 16, loc, ip)


@dsl_user_op
def fence_before_sync(
    *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> None:
    """Orders this thread's accesses to tensor memory before what it signals next."""
    _emit([], "tcgen05.fence::before_thread_sync;", "", loc, ip)


@dsl_user_op
def fence_after_sync(
    *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> None:
    """Orders this thread's accesses to tensor memory after what it has waited for."""
    _emit([], "tcgen05.fence::after_thread_sync;", "", loc, ip)


@dsl_user_op
def divide(
    a: Float32, b: Float32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> Float32:
    """a / b to 2 ulp, 0 for b above 2^126: ``__fdividef`` of the portable kernel."""
    operands = [Float32(value).ir_value(loc=loc, ip=ip) for value in (a, b)]
    code = "div.approx.f32 $0, $1, $2;"
    return Float32(_assembly(T.f32(), operands, code, "=f,f,f", False, loc, ip))


def _shared(pointer: Pointer, loc: ir.Location | None, ip: ir.InsertionPoint | None) -> Int32:
    return Int32(pointer.toint(loc=loc, ip=ip))


def _emit(
    operands: list,
    code: str,
    constraints: str,
    loc: ir.Location | None,
    ip: ir.InsertionPoint | None,
) -> None:
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    _assembly(None, values, code, constraints, True, loc, ip)


def _assembly(
    result: ir.Type | None,
    operands: list[ir.Value],
    code: str,
    constraints: str,
    effects: bool,
    loc: ir.Location | None,
    ip: ir.InsertionPoint | None,
) -> ir.Value:
    return llvm.inline_asm(
        result,
        operands,
        code,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
