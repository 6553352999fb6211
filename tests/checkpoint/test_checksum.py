"""Checksums tell memory from any other memory that damage makes of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.checkpoint import checksum as module
from dsv4.checkpoint.checksum import checksum

DATA = st.binary(min_size=1, max_size=200)


def memory(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def by_definition(data: bytes) -> int:
    """In Python's numbers."""
    total = 0
    step, factor = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
    padded = data + bytes(-len(data) % 8)
    for place in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * place : 8 * place + 8], "little")
        mixed = _signed(word + (place + 1) * step)
        mixed = _signed((mixed ^ mixed >> 29) * factor)
        total += mixed ^ mixed >> 32
    return total % 2**64


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


@given(data=DATA)
def test_every_word_is_mixed_with_its_place(data: bytes) -> None:
    assert checksum(memory(data)) == by_definition(data)


@given(data=st.binary(min_size=33, max_size=200))
def test_chunks_make_no_difference(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_WORDS", 2)
        assert checksum(memory(data)) == by_definition(data)


@given(data=DATA, bit=st.integers(min_value=0))
def test_one_bit_is_found(data: bytes, bit: int) -> None:
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    assert checksum(memory(bytes(changed))) != checksum(memory(data))


@given(words=st.lists(st.binary(min_size=8, max_size=8), min_size=2, unique=True))
def test_words_in_another_order_and_pairs_of_bits_are_found(words: list[bytes]) -> None:
    found = {checksum(memory(b"".join(words))), checksum(memory(b"".join(words[::-1])))}
    flipped = [bytes([*word[:-1], word[-1] ^ 0x80]) for word in words]
    found.add(checksum(memory(b"".join([*flipped[:2], *words[2:]]))))
    assert len(found) == 3


def test_nothing_has_a_checksum() -> None:
    assert checksum(memory(b"x")[:0]) == 0


@pytest.mark.gpu
def test_gpus_find_the_same() -> None:
    data = torch.randint(0, 256, (50_000_001,), dtype=torch.uint8)
    assert checksum(data.cuda()) == checksum(data)
