"""Headers that cannot be there, or that take long to parse, are refused before that."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsv4.checkpoint import shard
from dsv4.checkpoint.shard import read_header
from dsv4.errors import UserError


def test_a_header_of_too_many_values_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({str(index): torch.zeros(1) for index in range(6)}, path)
    monkeypatch.setattr(shard, "MAX_HEADER_VALUES", 24)
    assert len(read_header(path)) == 6
    monkeypatch.setattr(shard, "MAX_HEADER_VALUES", 23)
    monkeypatch.setattr(shard, "parse_json_object", lambda *_: pytest.fail("parsed"))
    with pytest.raises(UserError, match="header: found 24 JSON values, expected at most 23"):
        read_header(path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"1234567", (9).to_bytes(8, "little")),
        *(length.to_bytes(8, "little") + b"{}" for length in (3, 2**63)),
    ],
)
def test_impossible_header_length_is_one_clean_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=f"found {len(content)} bytes, expected 8 and a header of"):
        read_header(tmp_path / "bad.safetensors")
