"""Arguments as the driver reads them: each in a word of its own, of its type."""

import ctypes
from typing import Any

import pytest

from dsv4.launch.prepared import Words
from dsv4.launch.signature import Parameter


@pytest.mark.parametrize(
    ("kind", "word", "values"),
    [
        ("int", ctypes.c_int32, (-(1 << 31), -1, (1 << 31) - 1)),
        ("unsigned", ctypes.c_uint32, (0, 1 << 31, (1 << 32) - 1)),
        ("int64", ctypes.c_int64, (-(1 << 63), 1 << 40, (1 << 63) - 1)),
        ("float", ctypes.c_float, (0.5, -2.0, 3)),
    ],
)
def test_a_number_is_written_as_its_type(kind: str, word: Any, values: tuple[float, ...]) -> None:
    before, number, behind = (Parameter(name, kind, False) for name in ("a", "b", "c"))
    words = Words([before, number, behind])
    words.pack(dict(zip("abc", values, strict=True)))
    found = [word.from_address(words.addresses[name]).value for name in "abc"]
    assert found == list(values)


def test_an_address_may_be_as_high_as_there_are_bits() -> None:
    words = Words([Parameter("x", "float", True)])
    words.pack({"x": (1 << 64) - 512})
    assert ctypes.c_uint64.from_address(words.addresses["x"]).value == (1 << 64) - 512
