"""What the launcher of the token ring records."""

import pytest
import torch

from dsv4.ops.token_ring.cuda import store_token
from tests.ops.recorded import functions, launches, meta, numbers

I64 = torch.int64
TOKEN = meta(dtype=I64)
ONE = meta(1, dtype=I64)
NAN = meta(1, dtype=torch.int32)


def test_one_launch_stores_the_token() -> None:
    found = launches(store_token, TOKEN, ONE, ONE, meta(7, dtype=I64), NAN, tokens=1)
    assert functions(found) == ["store_token"]
    assert (found[0].shape.grid, found[0].shape.threads) == ((1, 1, 1), 32)
    assert numbers(found[0]) == {"slots": 7}


def test_other_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token: found torch\.int64 \[1\], expected"):
        launches(store_token, ONE, ONE, ONE, meta(7, dtype=I64), NAN, tokens=1)
    with pytest.raises(ValueError, match=r"ring_R: found \[2, 7\], expected \[R\]"):
        launches(store_token, TOKEN, ONE, ONE, meta(2, 7, dtype=I64), NAN, tokens=1)
    with pytest.raises(ValueError, match=r"ring_R: found torch\.float32 .*, expected torch\.int64"):
        launches(store_token, TOKEN, ONE, ONE, meta(7, dtype=torch.float32), NAN, tokens=1)
    with pytest.raises(ValueError, match="store_token: found a tensor on cpu, expected cuda:0"):
        launches(store_token, TOKEN, ONE, ONE, torch.zeros(7, dtype=I64), NAN, tokens=1)
    with pytest.raises(ValueError, match=r"nan_1: found torch\.int64 \[1\], expected"):
        launches(store_token, TOKEN, ONE, ONE, meta(7, dtype=I64), ONE, tokens=1)
