"""Barriers that tell whether a predicate is true in any thread: bar.red.or.pred."""

import numpy as np
import pytest

from tests.ptx.schedule import SCHEDULES
from tests.ptx.snippets import kernel, run_text

# Thread n leaves whether any thread is number 70 in bit 0, and number 96 in bit 1.
BODY = """
setp.eq.u32 %p1, %thread, 70;
setp.eq.u32 %p2, %thread, 96;
bar.red.or.pred %p3, {barrier}, %p1;
bar.red.or.pred %p4, {barrier}, %p2;
selp.u32 %r0, 1, 0, %p3;
selp.u32 %r1, 2, 0, %p4;
add.u32 %r0, %r0, %r1;
ld.param.u64 %out, [p0];
mad.wide.u32 %at, %thread, 4, %out;
st.global.b32 [%at], %r0;
"""


@pytest.mark.parametrize("barrier", ["0", "3, 96"])
def test_every_thread_knows_of_any(barrier: str) -> None:
    for schedule in SCHEDULES.values():
        result = np.full(96, 9, np.uint32)
        run_text(kernel(BODY.format(barrier=barrier), 1, 96), [result], 96, schedule=schedule)
        assert (result == 1).all()
