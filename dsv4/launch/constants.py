"""Enums and limits that Python and the device code share: this file is the only place that states
them.

``device_header`` is put in front of every source that is compiled.
"""

from enum import IntEnum

from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.weights.quant import QuantFormat


class RowCode(IntEnum):
    """How a cached row is stored: ``dsv4.caches.rows.RowFormat``, plain rows told apart by their
    dtype.
    """

    KV_FP8 = 0
    BF16 = 1
    F32 = 2
    INDEX_FP8 = 3


FORMAT_CODE = {
    QuantFormat.NVFP4: 0,
    QuantFormat.MXFP4: 1,
    QuantFormat.FP8_BLOCK128: 2,
    QuantFormat.BF16: 3,
}
FORMAT_NAME = {
    QuantFormat.NVFP4: "FORMAT_NVFP4",
    QuantFormat.MXFP4: "FORMAT_MXFP4",
    QuantFormat.FP8_BLOCK128: "FORMAT_FP8",
    QuantFormat.BF16: "FORMAT_BF16",
}
# Bytes of block scales beside one stage of 16 rows in a decode kernel's ring (four 512-byte loads
# of codes).
STAGE_SCALE_BYTES = {
    QuantFormat.NVFP4: 256,
    QuantFormat.MXFP4: 128,
    QuantFormat.FP8_BLOCK128: 16,
    QuantFormat.BF16: 0,
}
# Slots of decode_linear's rings are whole lines of shared memory.
SLOT_LINE_BYTES = 128
MAX_EXPERTS = 640
MAX_EXPERTS_PER_TOKEN = 16
# Ranks that share the seams of a long step take tiles of so many tokens in turn.
TOKEN_TILE = 16


def device_header() -> str:
    """The same names as preprocessor macros."""
    macros = {
        "MAX_DECODE_TOKENS": MAX_DECODE_TOKENS,
        "MAX_EXPERTS": MAX_EXPERTS,
        "MAX_EXPERTS_PER_TOKEN": MAX_EXPERTS_PER_TOKEN,
        "TOKEN_TILE": TOKEN_TILE,
        "SLOT_LINE_BYTES": SLOT_LINE_BYTES,
        **{f"ROW_{code.name}": code.value for code in RowCode},
        **{FORMAT_NAME[format]: code for format, code in FORMAT_CODE.items()},
        **{
            f"{FORMAT_NAME[format]}_STAGE_SCALE_BYTES": size
            for format, size in STAGE_SCALE_BYTES.items()
        },
    }
    return "".join(f"#define {name} {value}\n" for name, value in macros.items())
