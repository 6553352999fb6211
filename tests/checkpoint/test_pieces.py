"""Pieces of files in the spans that are read at once."""

import weakref
from itertools import pairwise
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.checkpoint.pieces import GAP, Piece, in_file_order, spans
from tests.checkpoint.shuffled import memory, shuffled_pieces


def test_pieces_are_read_in_file_order_without_going_back(files: list[Path]) -> None:
    ordered = in_file_order(shuffled_pieces(files))
    assert [piece.file.name for piece in ordered] == ["a"] * 9 + ["b"] * 9
    assert [piece.offset for piece in ordered[:9]] == sorted(piece.offset for piece in ordered[:9])


def test_spans_hold_everything_once_and_never_too_much(files: list[Path]) -> None:
    ordered = in_file_order(shuffled_pieces(files[:1]))
    cut = list(spans(ordered, 100))
    assert max(span.nbytes for span in cut) <= 100
    # Two that follow each other would not fit into one.
    assert all(one.nbytes + two.pieces[0].nbytes > 100 for one, two in pairwise(cut))
    inside = [(piece.offset, piece.offset + piece.nbytes) for span in cut for piece in span.pieces]
    assert [end for _, end in inside[:-1]] == [start for start, _ in inside[1:]]
    assert (inside[0][0], inside[-1][1]) == (0, 5000)
    assert [(span.offset, span.offset + span.nbytes) for span in cut] == [
        (span.pieces[0].offset, span.pieces[-1].offset + span.pieces[-1].nbytes) for span in cut
    ]


def test_a_piece_is_let_go_with_its_span(files: list[Path]) -> None:
    """Memory that was read into may be needed again long before all is read."""
    pieces = [Piece.whole(files[0], 100 * index, memory(100)) for index in range(20)]
    targets = [weakref.ref(piece.shares[0].target) for piece in pieces]
    found = spans(in_file_order(pieces), 100)
    del pieces
    for done, span in enumerate(found, 1):
        assert span.nbytes == 100
        # The span itself, the piece that showed that it was full, and those still to come.
        assert sum(target() is not None for target in targets) <= 20 - done + 2


@given(
    pieces=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300)), max_size=30),
    most=st.integers(1, 200),
)
def test_spans_of_pieces_anywhere_hold_the_bytes_of_every_one(
    pieces: list[tuple[int, int]], most: int
) -> None:
    """Overlapping ones too, and with bytes between them that nobody wants."""
    wanted = [Piece.whole(Path("a"), offset, memory(nbytes)) for offset, nbytes in pieces]
    found = list(spans(in_file_order(wanted), most))
    assert sum(piece.nbytes for span in found for piece in span.pieces) == sum(
        piece.nbytes for piece in wanted
    )
    for span in found:
        assert span.nbytes <= most
        for piece in span.pieces:
            assert span.offset <= piece.offset
            assert piece.offset + piece.nbytes <= span.offset + span.nbytes


def test_bytes_between_pieces_are_read_with_them_where_they_are_few(tmp_path: Path) -> None:
    near = [Piece.whole(tmp_path, offset, memory(10)) for offset in (0, 10 + GAP)]
    assert len(list(spans(near, 10 * GAP))) == 1
    far = [Piece.whole(tmp_path, offset, memory(10)) for offset in (0, 11 + GAP)]
    assert len(list(spans(far, 10 * GAP))) == 2


def test_devices_take_turns(tmp_path: Path) -> None:
    meta = torch.device("meta")
    pieces = [Piece.whole(tmp_path, at * 100, memory(100)) for at in range(4)]
    pieces += [Piece.whole(tmp_path, at * 100, memory(100, meta)) for at in range(4, 7)]
    offsets = [span.offset for span in spans(pieces, 100)]
    assert offsets == [0, 400, 100, 500, 200, 600, 300]
