"""Faults of the Blackwell products with quantised activations."""

from tests.ptx import edits, faults
from tests.ptx.edits import Edit, before, behind, more_bytes, moved_box, remove, replace
from tests.ptx.planted import Planted, WrongValues

# The roles of the block-scaled product: products stand between two barriers of 160 threads, results
# behind the second.
_ROLE = r"bar\.sync\s+2, 160;"
_MMA = (
    r"(tcgen05\.mma\.\S+)\s+(\[[^\]]*\]), (%rd\d+), (%rd\d+), (%r\d+),"
    r" \[(%r\d+)\], \[(%r\d+)\], (%p\d+);"
)


def products(edit: Edit) -> Edit:
    """The edit of the warp that multiplies."""
    return behind(_ROLE, before(_ROLE, edit))


def results(edit: Edit) -> Edit:
    """The edit of the warps that read sums and write results."""
    return behind(_ROLE, behind(_ROLE, edit))


def descriptor(place: int, bits: str, operation: str, value: int) -> Edit:
    """A descriptor or an address of all products, changed by an instruction."""
    operands = [r"\2", r"\3", r"\4", r"\5", r"[\6]", r"[\7]", r"\8"]
    old = rf"\{place + 2}"
    operands[place] = "[new]" if place in (4, 5) else "new"
    changed = f"{{.reg .{bits} new; {operation}.{bits} new, {old}, {value};"
    return replace(_MMA, rf"{changed} \1 {', '.join(operands)};}}")


SCALED = (
    Planted(
        "products do not wait for their operands",
        "nvfp4",
        products(replace(edits.WAIT, edits.NO_WAIT, 1)),
        (WrongValues, faults.TooManyArrivals, faults.Deadlock),
    ),
    Planted(
        "products do not wait until the sums were read",
        "nvfp4",
        products(replace(edits.WAIT, edits.NO_WAIT, 0)),
        (WrongValues, faults.TooManyArrivals, faults.Deadlock),
    ),
    Planted(
        "copies do not wait for a free stage",
        "nvfp4",
        replace(edits.WAIT, edits.NO_WAIT, 0),
        (WrongValues, faults.TooManyArrivals),
    ),
    Planted(
        "results do not wait for the sums",
        "nvfp4",
        results(replace(edits.WAIT, edits.NO_WAIT)),
        (WrongValues, faults.BeyondAllocation, faults.TooManyArrivals),
    ),
    Planted(
        "registers are read before tcgen05.wait::ld",
        "nvfp4",
        remove(r"tcgen05\.wait::ld\S*;", 0),
        (faults.TooEarly,),
    ),
    Planted(
        "tensor memory is not freed",
        "nvfp4",
        remove(r"tcgen05\.dealloc[^;]*;"),
        (faults.NotFreed,),
    ),
    Planted(
        "too little tensor memory",
        "nvfp4",
        replace(r"512;(\s*tcgen05\.alloc)", r"256;\1"),
        (faults.BeyondAllocation,),
    ),
    Planted(
        "a commit frees the next stage",
        "nvfp4",
        replace(r"(tcgen05\.commit\S+\s+\[%r\d+)\+\d+\]", r"\1+56]", 0),
        (faults.Deadlock, faults.TooManyArrivals, WrongValues),
    ),
    Planted(
        "scales of rows and weights are swapped",
        "nvfp4",
        replace(_MMA, r"\1 \2, \3, \4, \5, [\7], [\6], \8;"),
        (WrongValues,),
    ),
    Planted(
        "scales of weights are one column off",
        "nvfp4",
        descriptor(5, "b32", "add", 1),
        (WrongValues,),
    ),
    Planted(
        "E4M3 scales are taken for E8M0",
        "nvfp4",
        descriptor(3, "b32", "xor", 1 << 23),
        (WrongValues,),
    ),
    Planted(
        "products of 112 features instead of 128",
        "nvfp4",
        descriptor(3, "b32", "sub", 2 << 17),
        (WrongValues,),
    ),
    Planted(
        "products of 256 rows by one CTA",
        "nvfp4",
        descriptor(3, "b32", "add", 1 << 27),
        (faults.BadDescriptor,),
    ),
    Planted(
        "a scale for 32 columns instead of 16",
        "nvfp4",
        replace(r"block_scale\.block16", "block_scale.block32"),
        (WrongValues,),
    ),
    Planted(
        "rows are read with 64-byte swizzle",
        "nvfp4",
        descriptor(1, "b64", "xor", -(1 << 62)),
        (WrongValues, faults.BadDescriptor),
    ),
    Planted(
        "eight rows of weights are 1,536 bytes apart",
        "nvfp4",
        descriptor(2, "b64", "add", 32 << 32),
        (WrongValues,),
    ),
    Planted(
        "a step of rows starts 16 bytes late",
        "nvfp4",
        descriptor(1, "b64", "add", 1),
        (WrongValues, faults.BadDescriptor),
    ),
    Planted(
        "the first product adds to the sums of another tile",
        "nvfp4",
        replace(r"mov\.pred\s+(%p\d+), 0;", r"mov.pred \1, -1;"),
        (WrongValues,),
    ),
    Planted(
        "results of the other buffer",
        "nvfp4",
        replace(
            r"(tcgen05\.ld\S+)\s+(\{[^}]*\}), \[(%r\d+)(\+\d+)?\];",
            r"{.reg .b32 other; xor.b32 other, \3, 128; \1 \2, [other\4];}",
        ),
        (WrongValues,),
    ),
    Planted(
        "rows that are not there are stored",
        "nvfp4",
        results(replace(r"or\.pred\s+(%p\d+), (%p\d+), %p\d+;", r"or.pred \1, \2, \2;")),
        (faults.OutOfBounds,),
    ),
    Planted(
        "features that are not there are stored",
        "nvfp4",
        results(replace(r"or\.pred\s+(%p\d+), %p\d+, (%p\d+);", r"or.pred \1, \2, \2;")),
        (WrongValues, faults.OutOfBounds),
    ),
    Planted(
        "the rows' global scale counts twice, the weight's not at all",
        "nvfp4",
        results(replace(r"mul\.f32\s+(%r\d+), (%r\d+), %r\d+;", r"mul.f32 \1, \2, \2;", 0)),
        (WrongValues,),
    ),
    Planted("32 bytes too many expected", "nvfp4", more_bytes(32), (faults.Deadlock,)),
    Planted("rows are one K tile off", "nvfp4", moved_box(0, 0, 256), (WrongValues,)),
    Planted(
        "barriers are used before all warps see them",
        "nvfp4",
        remove(r"bar\.sync\s+0;", 0),
        (faults.NoBarrier, faults.BeyondAllocation, WrongValues),
    ),
    Planted(
        "4-bit weights lie packed instead of in 8-bit containers",
        "packed",
        edits.unchanged,
        (WrongValues,),
    ),
    Planted(
        "a tile takes the weights of the next expert",
        "gate_up",
        moved_box(2, 2, 1),
        (WrongValues,),
    ),
    Planted(
        "the pair allocates behind the cluster barrier",
        "pair",
        edits.alloc_behind_cluster_barrier,
        (faults.BeyondAllocation,),
    ),
    Planted(
        "a commit wakes one CTA of the pair",
        "pair",
        replace(
            r"(tcgen05\.commit\S*)\.multicast::cluster(\S*)\s+(\[[^\]]*\]), %rs\d+;",
            r"\1\2 \3;",
            -1,
        ),
        (faults.Deadlock,),
    ),
    Planted(
        "copies of the second CTA count on its own barrier",
        "pair",
        replace(r"-16777224;", "-8;"),
        (faults.Deadlock,),
    ),
    Planted(
        "scales of weights come to one CTA of the pair",
        "pair",
        replace(
            r"(cp\.async\S*multicast\S*\s[^;]*), (%rs\d+), (%rd\d+);",
            r"{.reg .b16 one; and.b16 one, \2, 1; \1, one, \3;}",
        ),
        (faults.Deadlock, WrongValues),
    ),
    Planted(
        "the second CTA tells itself that it has read the sums",
        "pair",
        replace(r"mapa\.\S+\s+(%r\d+), (%r\d+), %r\d+;", r"mov.b32 \1, \2;", 0),
        (faults.Deadlock, faults.TooManyArrivals, WrongValues),
    ),
)
