"""Faults of ``HopperGemm``."""

from tests.ptx import edits, faults
from tests.ptx.edits import behind, more_bytes, moved_box, remove, replace
from tests.ptx.planted import Planted, WrongValues

CONSUMER = r"setmaxnreg\.inc\S*\s+\d+;"
HOPPER = (
    Planted(
        "products do not wait for their operands",
        "hopper",
        behind(CONSUMER, replace(edits.WAIT, edits.NO_WAIT)),
        (WrongValues, faults.TooManyArrivals, faults.Deadlock),
    ),
    Planted(
        "the producer does not wait for a free stage",
        "hopper",
        replace(edits.WAIT, edits.NO_WAIT, 0),
        (WrongValues, faults.TooManyArrivals),
    ),
    Planted(
        "the consumer waits for the other phase",
        "hopper",
        behind(CONSUMER, replace(edits.WAIT, edits.OTHER_PHASE)),
        (WrongValues, faults.Deadlock),
    ),
    Planted("16 bytes too many expected", "hopper", more_bytes(16), (faults.Deadlock,)),
    Planted("16 bytes too few expected", "hopper", more_bytes(-16), (faults.Deadlock,)),
    Planted(
        "a stage is never released",
        "hopper",
        behind(CONSUMER, remove(r"mbarrier\.arrive\.shared[^;]*;")),
        (faults.Deadlock,),
    ),
    Planted(
        "a barrier expects one arrival more",
        "hopper",
        replace(
            r"mbarrier\.init\.shared\.b64\s+(\[[^\]]*\]), ([^;]*);",
            r"{.reg .b32 n; add.s32 n, \2, 1; mbarrier.init.shared.b64 \1, n;}",
            3,
        ),
        (faults.Deadlock,),
    ),
    Planted(
        "the sums are read before the last product",
        "hopper",
        replace(r"(wgmma\.wait_group\S*)\s+0;", r"\1 1;"),
        (faults.TooEarly,),
    ),
    Planted(
        "sums do not start at zero",
        "hopper",
        behind(CONSUMER, replace(r"0f00000000", "0f3F800000")),
        (WrongValues,),
    ),
    Planted(
        "TMA reads what no proxy fence made visible",
        "hopper",
        remove(r"fence\.proxy\.async\S*;"),
        (faults.MissingFence,),
    ),
    Planted(
        "the tile is stored before all warps wrote it",
        "hopper",
        behind(r"fence\.proxy\.async", remove(r"bar\.sync[^;]*;", 0)),
        (WrongValues, faults.MissingFence),
    ),
    Planted(
        "the tile is stored untransposed",
        "hopper",
        replace(r"(stmatrix\S*)\.trans", r"\1"),
        (WrongValues,),
    ),
    Planted(
        "the producer keeps registers that consumers need",
        "two warpgroups",
        replace(r"(setmaxnreg\.dec\S*)\s+\d+;", r"\1 48;"),
        (faults.RegisterBudget,),
    ),
    Planted("tokens are one K tile off", "hopper", moved_box(0, 0, 64), (WrongValues,)),
    Planted("weights are one K tile off", "hopper", moved_box(1, 2, 1), (WrongValues,)),
    Planted("block scales are one K tile off", "hopper", moved_box(2, 2, 1), (WrongValues,)),
)
