"""Functions that kernels call: what is passed and returned, loops and calls inside of them."""

import numpy as np
import pytest

from tests.ptx.faults import Unsupported
from tests.ptx.snippets import kernel, run_text

# power(x, n) has a loop and returns at two places; pair(x) calls it twice, and returns two numbers.
FUNCTIONS = """
.func (.param .b32 func_retval0) power(.param .b32 power_param_0, .param .b32 power_param_1)
{
.reg .pred %p<2>;
.reg .b32 %r<4>;
ld.param.u32 %r1, [power_param_0];
ld.param.u32 %r2, [power_param_1];
mov.u32 %r3, 1;
$L__BB0_1:
setp.eq.u32 %p1, %r2, 0;
@%p1 bra $L__BB0_2;
mul.lo.u32 %r3, %r3, %r1;
sub.u32 %r2, %r2, 1;
bra $L__BB0_1;
$L__BB0_2:
st.param.b32 [func_retval0+0], %r3;
setp.lt.u32 %p1, %r3, 100;
@%p1 ret;
st.param.b32 [func_retval0+0], 100;
ret;
}
.func (.param .align 4 .b8 func_retval0[8]) pair(.param .align 4 .b8 pair_param_0[8])
{
.reg .b32 %r<5>;
ld.param.u32 %r1, [pair_param_0];
ld.param.u32 %r2, [pair_param_0+4];
{
.param .b32 param0;
st.param.b32 [param0+0], %r1;
.param .b32 param1;
st.param.b32 [param1+0], 2;
.param .b32 retval0;
call.uni (retval0),
power,
(
param0,
param1
);
ld.param.b32 %r3, [retval0+0];
}
{
.param .b32 param0;
st.param.b32 [param0+0], %r2;
.param .b32 param1;
st.param.b32 [param1+0], 3;
.param .b32 retval0;
call.uni (retval0), power, (param0, param1);
ld.param.b32 %r4, [retval0+0];
}
st.param.b32 [func_retval0+0], %r3;
st.param.b32 [func_retval0+4], %r4;
ret;
}
"""
BODY = """
add.u32 %r1, %lane, 1;
{
.param .align 4 .b8 param0[8];
st.param.v2.b32 [param0], {%lane, %r1};
.param .align 4 .b8 retval0[8];
call.uni (retval0), pair, (param0);
ld.param.v2.b32 {%r2, %r3}, [retval0];
}
ld.param.u64 %out, [p0];
mul.wide.u32 %at, %lane, 8;
add.u64 %at, %at, %out;
st.global.v2.b32 [%at], {%r2, %r3};
"""


def test_calls_inside_of_calls() -> None:
    found = np.zeros((32, 2), np.uint32)
    run_text(FUNCTIONS + kernel(BODY, pointers=1), [found])
    lanes = np.arange(32)
    assert (found[:, 0] == np.minimum(lanes**2, 100)).all()
    assert (found[:, 1] == np.minimum((lanes + 1) ** 3, 100)).all()


def test_a_function_that_is_not_there() -> None:
    with pytest.raises(Unsupported, match="call of pair"):
        run_text(kernel(BODY, pointers=1), [np.zeros(64, np.uint32)])
