"""Faults of the Blackwell products with 16-bit activations."""

from tests.ptx import edits, faults
from tests.ptx.edits import before, more_bytes, remove, replace
from tests.ptx.planted import Planted, WrongValues

# In the product with 16-bit activations the waits before an instruction tell the roles apart.
_STORE = r"tcgen05\.st\."
_PRODUCT = r"tcgen05\.mma\."
W16 = (
    Planted(
        "weights are decoded before they are there",
        "w16",
        before(_STORE, replace(edits.WAIT, edits.NO_WAIT, -2)),
        (WrongValues, faults.TooManyArrivals, faults.Deadlock),
    ),
    Planted(
        "decoded weights are overwritten before products read them",
        "w16",
        before(_STORE, replace(edits.WAIT, edits.NO_WAIT, -1)),
        (WrongValues, faults.TooManyArrivals, faults.Deadlock),
    ),
    Planted(
        "products do not wait for decoded weights",
        "w16",
        before(_PRODUCT, replace(edits.WAIT, edits.NO_WAIT, -1)),
        (WrongValues, faults.TooEarly, faults.TooManyArrivals),
    ),
    Planted(
        "decoded weights are announced before tcgen05.wait::st",
        "w16",
        remove(r"tcgen05\.wait::st\S*;"),
        (faults.TooEarly,),
    ),
    Planted(
        "decoded rows go to the other half of a warp's lanes",
        "w16",
        replace(
            r"(tcgen05\.st\S+)\s+\[(%r\d+)\], (\{[^}]*\});",
            r"{.reg .b32 other; xor.b32 other, \2, 0x100000; \1 [other], \3;}",
        ),
        (WrongValues,),
    ),
    Planted(
        "decoded rows go to another warp's lanes",
        "w16",
        replace(
            r"(tcgen05\.st\S+)\s+\[(%r\d+)\], (\{[^}]*\});",
            r"{.reg .b32 other; xor.b32 other, \2, 0x200000; \1 [other], \3;}",
        ),
        (faults.WrongQuarter,),
    ),
    Planted(
        "tokens are taken for columns of K",
        "w16",
        replace(
            r"(tcgen05\.mma\.\S+\s+\[[^\]]*\], \[[^\]]*\], %rd\d+), (%r\d+), ([^;]*);",
            r"{.reg .b32 new; or.b32 new, \2, 0x10000; \1, new, \3;}",
        ),
        (faults.BadDescriptor,),
    ),
    Planted(
        "a stage is free before the last of its readers is done",
        "w16",
        replace(r", 5;(\s*mbarrier\.init)", r", 4;\1"),
        (WrongValues, faults.TooManyArrivals, faults.Deadlock),
    ),
    Planted(
        "neighbours of the rows that are asked for are gathered",
        "gather",
        edits.next_rows_gathered,
        (WrongValues,),
    ),
    Planted(
        "a gathered tile is four rows short",
        "gather",
        more_bytes(-4 * 128),
        (faults.Deadlock, faults.TooManyArrivals, WrongValues),
    ),
)
