"""The collector of cycles runs again behind work that goes without it."""

import gc

import pytest

from dsv4.checkpoint.uncollected import uncollected


def test_the_collector_is_as_before_also_behind_an_error() -> None:
    assert gc.isenabled()
    with uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), uncollected():
        _ = 1 // 0
    assert gc.isenabled()
