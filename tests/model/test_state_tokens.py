"""State files that are whole, but whose tokens or whose checksum is none."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint.state_file import FORMAT, TOKENS, SavedState
from dsv4.checkpoint.writer import StoredType, lay_out_file
from dsv4.errors import UserError


def state_of(path: Path, tokens: Tensor | None) -> Path:
    """A file of these tokens alone, with its checksum."""
    zeros = "0" * 64
    facts = json.dumps({"furthest": 3, "notes": {}})
    stored = {} if tokens is None else {TOKENS: StoredType(tokens.dtype, tuple(tokens.shape))}
    raw, _ = lay_out_file(stored, {"format": FORMAT, "sha256": zeros, "state": facts})
    if tokens is not None:
        raw += tokens.numpy().tobytes()
    path.write_bytes(raw.replace(zeros.encode(), hashlib.sha256(raw).hexdigest().encode(), 1))
    return path


def test_tokens_are_one_row_of_int64(tmp_path: Path) -> None:
    assert SavedState.open(state_of(tmp_path / "x", torch.tensor([5, 0, 7]))).token_ids == [5, 0, 7]


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (None, "no such tensor"),
        (torch.zeros(3), "float32 [3]"),
        (torch.zeros(1, 3, dtype=torch.int64), "int64 [1, 3]"),
    ],
)
def test_other_tokens_are_refused(tokens: Tensor | None, found: str, tmp_path: Path) -> None:
    message = re.escape(f"x: token_ids: found {found}, expected int64 [T]")
    with pytest.raises(UserError, match=f"{message}$"):
        SavedState.open(state_of(tmp_path / "x", tokens))


def test_a_checksum_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    path = state_of(tmp_path / "x", torch.tensor([5, 0, 7]))
    path.write_bytes(re.sub(rb'"[0-9a-f]{64}"', rb'"\\ud800' + b"0" * 58 + b'"', path.read_bytes()))
    with pytest.raises(UserError, match=r"x: damaged: its SHA-256 .* expected '\\ud8000*'$"):
        SavedState.open(path)
