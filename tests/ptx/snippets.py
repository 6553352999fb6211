"""A few instructions as a whole kernel: what the tests of single instructions run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.launch import Launch
from tests.ptx.memory import GlobalMemory
from tests.ptx.program import load
from tests.ptx.run import run_launch
from tests.ptx.schedule import SCHEDULES, Choices, Schedule

Array = NDArray[Any]
_REGISTERS = """
.reg .pred %p<9>;
.reg .b16 %h<9>;
.reg .b32 %r<33>;
.reg .b64 %l<9>;
.reg .b64 %in, %out, %at;
.reg .b32 %lane, %thread;
"""


def run_lanes(code: str, inputs: Sequence[Any], dtype: Any = np.uint32) -> Array:
    """Runs ``code`` in one warp and returns a result per lane.

    Input n, 32 numbers of 32 or 64 bits (or one for all lanes), lies in %a0, %a1, and so on; the
    code leaves its result in %d, as wide as ``dtype``. %p, %h, %r and %l are predicates and
    registers of 16, 32 and 64 bits, %lane is the lane.
    """
    result = np.full(32, 0xEE, dtype)
    arrays = [np.broadcast_to(np.asarray(values), 32).copy() for values in inputs]
    loads = "".join(_input(n, values) for n, values in enumerate(arrays))
    declared = "".join(f".reg .b{8 * v.itemsize} %a{n};" for n, v in enumerate(arrays))
    size = result.itemsize
    text = f"""
.entry snippet({", ".join(f".param .u64 p{n}" for n in range(len(arrays) + 1))})
.reqntid 32, 1, 1
{{
{_REGISTERS}
{declared}
.reg .b{8 * size} %d;
mov.u32 %lane, %laneid;
{loads}
{code}
ld.param.u64 %out, [p{len(arrays)}];
cvt.u64.u32 %at, %lane;
mad.lo.s64 %at, %at, {size}, %out;
st.global.b{8 * size} [%at], %d;
ret;
}}
"""
    run_text(text, [*arrays, result])
    return result


def _input(n: int, values: Array) -> str:
    size = values.itemsize
    return (
        f"ld.param.u64 %in, [p{n}]; cvt.u64.u32 %at, %lane; mad.lo.s64 %at, %at, {size}, %in;"
        f"ld.global.b{8 * size} %a{n}, [%at];\n"
    )


def run_text(
    ptx: str,
    tensors: Sequence[Array],
    threads: int = 32,
    cluster: int = 1,
    shared_bytes: int = 4096,
    schedule: Schedule = SCHEDULES["random"],
    maps: Sequence[bytes] = (),
) -> int:
    """Runs a kernel whose parameters are pointers to the tensors, then tensor maps; one cluster.

    Returns the number of warp instructions.
    """
    memory = GlobalMemory()
    for n, tensor in enumerate(tensors):
        memory.register(f"tensor {n}", tensor.ctypes.data, tensor.nbytes)
    pointers = [tensor.ctypes.data.to_bytes(8, "little") for tensor in tensors]
    ((name, kernel),) = load(ptx).items()
    launch = Launch(
        name,
        (cluster, 1, 1),
        (threads, 1, 1),
        (*pointers, *maps),
        (cluster, 1, 1),
        shared_bytes,
    )
    return run_launch(kernel, launch, memory, Choices(schedule))


def kernel(body: str, pointers: int = 0, threads: int = 32, maps: int = 0) -> str:
    """PTX of a kernel: parameters p0, p1, ... and m0, m1, ..., dynamic shared memory ``smem``.

    Predicates, registers and %lane as in ``run_lanes``; %thread is the thread of the block.
    """
    parameters = [f".param .u64 p{n}" for n in range(pointers)]
    parameters += [f".param .align 64 .b8 m{n}[128]" for n in range(maps)]
    return f"""
.extern .shared .align 1024 .b8 smem[];
.entry snippet({", ".join(parameters)})
.reqntid {threads}, 1, 1
{{
{_REGISTERS}
mov.u32 %lane, %laneid;
mov.u32 %thread, %tid.x;
{body}
ret;
}}
"""
