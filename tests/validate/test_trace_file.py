"""Trace files: what is refused, and how the files of ranks become one trace (docs/traces.md)."""

import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4.errors import UserError
from dsv4.validate.joined_trace import JoinedTrace, Unequal
from dsv4.validate.trace_file import slices
from tests.validate.trace_files import random, write


@pytest.fixture
def stack() -> Any:
    with ExitStack() as stack:
        yield stack


def ranks(folder: Path, *values: dict[str, Tensor], **metadata: Any) -> list[Path]:
    """One file per rank, given in another order than theirs."""
    count = str(len(values))
    paths = [
        write(folder / f"r{rank}.safetensors", held, rank=str(rank), ranks=count, **metadata)
        for rank, held in enumerate(values)
    ]
    return paths[::-1]


def whole(trace: JoinedTrace, name: str) -> Tensor:
    """Read in two slices."""
    rows = trace.shape(name)[0]
    return torch.cat([trace.rows(name, 0, 2), trace.rows(name, 2, rows)])


def test_heads_vocabulary_and_partial_results_are_joined(tmp_path: Path, stack: ExitStack) -> None:
    q = random(6, 4, 8)
    logits = random(6, 11)
    padded = torch.cat([logits, torch.zeros(6, 1)], 1)
    result = random(6, 5)
    # Wider than the vocabulary, whose padding only logits have.
    same = random(6, 13)
    # Ranks may hold unequal parts.
    shares = padded.split([7, 5], 1)
    parts = [
        {
            "layers.0.attn.q": q[:, 2 * rank : 2 * rank + 2].contiguous(),
            "logits": shares[rank].contiguous(),
            "layers.0.ffn.output": result * (0.25 + 0.5 * rank),
            "layers.0.attn.kv": same,
        }
        for rank in range(2)
    ]
    join = {"layers.*.ffn.output": "sum"}
    paths = ranks(tmp_path, *parts, join=join, config={"vocab_size": 11})
    trace = JoinedTrace(paths, stack)
    assert trace.shape("layers.0.attn.q") == [6, 4, 8]
    assert torch.equal(whole(trace, "layers.0.attn.q"), q)
    assert trace.shape("logits") == [6, 11]
    assert torch.equal(whole(trace, "logits"), logits)
    assert torch.allclose(whole(trace, "layers.0.ffn.output"), result)
    assert trace.shape("layers.0.attn.kv") == [6, 13]
    assert torch.equal(whole(trace, "layers.0.attn.kv"), same)
    assert trace.unequal == {}


def test_a_sum_of_bfloat16_parts_is_not_rounded(tmp_path: Path, stack: ExitStack) -> None:
    parts = [random(6, 5, seed=rank).bfloat16() for rank in range(3)]
    paths = ranks(tmp_path, *({"a": part} for part in parts), join={"a": "sum"})
    found = whole(JoinedTrace(paths, stack), "a")
    assert torch.equal(found, torch.stack(parts).float().sum(0))


def test_ranks_that_differ_where_they_should_not_are_reported(
    tmp_path: Path, stack: ExitStack
) -> None:
    kv = random(6, 3)
    late = kv.clone()
    late[1, 0] += 0.25
    late[4, 1] -= 0.5
    found = [
        {"a": kv, "b": kv.flip(0), "c": 2 * kv},
        {"a": late, "b": late.flip(0), "c": 2 * kv},
    ]
    trace = JoinedTrace(ranks(tmp_path, *found), stack)
    assert torch.equal(whole(trace, "a"), kv)
    for name in ("b", "c"):
        whole(trace, name)
    # The largest of all slices, in whichever it is.
    assert trace.unequal == {name: Unequal((0, 1), 0.5) for name in ("a", "b")}


def test_the_ranks_that_differ_most_are_named_where_others_hold_nothing(
    tmp_path: Path, stack: ExitStack
) -> None:
    ones = torch.ones(6, 2)
    held: list[dict[str, Tensor]] = [{}, {"a": ones}, {"a": ones}, {"a": 4 * ones}, {"a": 3 * ones}]
    trace = JoinedTrace(ranks(tmp_path, *held), stack)
    whole(trace, "a")
    assert trace.unequal == {"a": Unequal((1, 3), 3.0)}


def test_nan_and_inf_on_all_ranks_are_equal(tmp_path: Path, stack: ExitStack) -> None:
    value = torch.full((6, 2), -math.inf)
    value[0] = math.nan
    trace = JoinedTrace(ranks(tmp_path, {"a": value}, {"a": value * 1}), stack)
    whole(trace, "a")
    assert trace.unequal == {}


def test_an_infinity_on_one_rank_is_an_infinite_difference(
    tmp_path: Path, stack: ExitStack
) -> None:
    trace = JoinedTrace(
        ranks(tmp_path, {"a": torch.ones(6, 2)}, {"a": torch.full((6, 2), -math.inf)}), stack
    )
    whole(trace, "a")
    assert trace.unequal == {"a": Unequal((0, 1), math.inf)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_ranks_are_compared_by_their_bits(
    tmp_path: Path, stack: ExitStack, dtype: torch.dtype
) -> None:
    zeros = torch.zeros(6, 3).to(dtype)
    negative = (-torch.zeros(6, 3)).to(dtype)
    trace = JoinedTrace(ranks(tmp_path, {"a": zeros}, {"a": negative}), stack)
    whole(trace, "a")
    assert trace.unequal == {"a": Unequal((0, 1), 0.0)}


def test_a_common_value_may_be_on_some_ranks_only(tmp_path: Path, stack: ExitStack) -> None:
    paths = ranks(tmp_path, {}, {"hidden": random(6, 3)})
    assert JoinedTrace(paths, stack).shape("hidden") == [6, 3]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([{"rank": "0", "ranks": "2"}], "ranks: found rank 0, expected rank 1 too"),
        (
            [{"rank": "0", "ranks": "2"}, {"rank": "0", "ranks": "2"}],
            r"1.safetensors: rank: found 0, which .*0.safetensors is too",
        ),
        (
            [{"rank": "0", "ranks": "2"}, {"rank": "1", "ranks": "4"}],
            "1.safetensors: ranks: found 4, expected 2 as in 0.safetensors",
        ),
        (
            [{"rank": "0", "ranks": "2"}, {"rank": "5", "ranks": "2"}],
            "expected rank 1 too",
        ),
        (
            [{"rank": rank, "ranks": "2"} for rank in ("0", "1", "5")],
            "2.safetensors: rank: found 5, expected below 2",
        ),
        ([{}, {}], "0.safetensors: ranks: found None, expected a number from 1 in the metadata"),
        ([{"rank": "x", "ranks": "1"}], "rank: found 'x', expected a number"),
        ([{"ranks": "0"}], "ranks: found '0', expected a number from 1"),
        ([{"format": "mine"}], "format: found 'mine', expected 'dsv4-trace/1'"),
        ([{"join": {"a": "concat:0"}}], "join: a: found 'concat:0', expected 'equal', 'sum' or"),
        ([{"join": {"a": "concat:2"}}], "join: a: found 'concat:2', expected one of its 2 dim"),
        ([{"join": {"a": "concat:-2"}}], "join: a: found 'concat:-2', expected one of its 2 dim"),
        ([{"rank": "0", "ranks": "1" * 5000}], "ranks: found '1{76}..., expected a number"),
        ([{"join": {"a": 5}}], "join: a: found 5, expected 'equal', 'sum' or"),
        ([{"join": "["}], "join: not valid JSON"),
        ([{"config": {"vocab_size": 0}}], "config: vocab_size: found 0, expected an integer from"),
        ([{"config": {"vocab_size": -3}}], "config: vocab_size: found -3, expected an integer"),
    ],
)
def test_wrong_metadata_is_one_line(
    files: list[dict[str, Any]], message: str, tmp_path: Path, stack: ExitStack
) -> None:
    paths = [
        write(tmp_path / f"{index}.safetensors", {"a": random(6, 3)}, **metadata)
        for index, metadata in enumerate(files)
    ]
    with pytest.raises(UserError, match=message) as error:
        JoinedTrace(paths, stack).shape("a")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"token_ids": torch.arange(4)}, "positions: found 6, expected 4, one for every token"),
        ({"positions": torch.arange(6) + 1}, "positions[0]: found 1, expected 0"),
        ({"positions": torch.tensor([0, 1, 3, 2, 4, 5])}, "positions[2]: found 3, expected 2"),
        ({"token_ids": torch.zeros(6)}, "token_ids: found F32 [6], expected I64 [T]"),
        ({"token_ids": torch.arange(6)[None]}, "token_ids: found I64 [1, 6], expected I64 [T]"),
        (
            dict.fromkeys(("token_ids", "positions"), torch.zeros(0, dtype=torch.int64)),
            "token_ids: found none, expected at least one token",
        ),
    ],
)
def test_wrong_tokens_are_one_line(
    values: dict[str, Tensor], message: str, tmp_path: Path, stack: ExitStack
) -> None:
    path = write(tmp_path / "a.safetensors", values)
    with pytest.raises(UserError) as error:
        JoinedTrace([path], stack)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("names", "metadata", "message"),
    [
        (["positions"], {"format": "dsv4-trace/1"}, "token_ids: not in the file"),
        (["token_ids"], {"format": "dsv4-trace/1"}, "positions: not in the file"),
        (
            ["token_ids", "positions"],
            None,
            "format: found None, expected 'dsv4-trace/1' in the metadata (docs/traces.md)",
        ),
    ],
)
def test_what_every_trace_has_and_a_file_lacks_is_one_line(
    names: list[str],
    metadata: dict[str, str] | None,
    message: str,
    tmp_path: Path,
    stack: ExitStack,
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({name: torch.arange(6) for name in names}, path, metadata)
    with pytest.raises(UserError) as error:
        JoinedTrace([path], stack)
    assert str(error.value) == f"{path}: {message}"


def test_token_ids_of_a_dtype_that_torch_lacks_are_one_line(
    tmp_path: Path, stack: ExitStack
) -> None:
    ids = torch.zeros(6).to(torch.float8_e4m3fn)
    path = write(tmp_path / "a.safetensors", {"token_ids": ids})
    six_bits = (b'"F8_E4M3","shape":[6]', b'"F6_E2M3","shape":[8]')
    path.write_bytes(path.read_bytes().replace(*six_bits))
    with pytest.raises(UserError, match=r"token_ids: found F6_E2M3 \[8\], expected I64 \[T\]"):
        JoinedTrace([path], stack)


def test_a_name_that_cannot_be_printed_is_one_line(tmp_path: Path, stack: ExitStack) -> None:
    path = write(tmp_path / "a.safetensors", {"hidden\x1b[31m\n": random(6, 3)})
    expected = r"a value 'hidden\\x1b\[31m\\n', expected a printable name$"
    with pytest.raises(UserError, match=expected):
        JoinedTrace([path], stack)


def test_ranks_of_other_tokens_and_shapes_are_refused(tmp_path: Path, stack: ExitStack) -> None:
    tokens = torch.arange(10, 16)
    tokens[3] = 99
    paths = ranks(tmp_path, {}, {"token_ids": tokens})
    with pytest.raises(UserError, match=r"token_ids\[3\]: found 99, expected 13 as in r0"):
        JoinedTrace(paths, stack)
    paths = ranks(tmp_path, {"a": random(6, 3)}, {"a": random(6, 4)})
    with pytest.raises(UserError, match=r"a: found \[6, 4\], expected \[6, 3\] as in r0"):
        JoinedTrace(paths, stack).shape("a")
    paths = ranks(tmp_path, {"a": random(6, 3)}, {"a": random(6, 3, 1)})
    with pytest.raises(UserError, match=r"a: found \[6, 3, 1\], expected \[6, 3\] as in r0"):
        JoinedTrace(paths, stack).shape("a")
    paths = ranks(tmp_path, {"a": random(6, 3)}, {"a": random(6, 3).to(torch.float8_e4m3fn)})
    with pytest.raises(UserError, match=r"r1.*: a: found F8_E4M3, expected F32 as in r0"):
        JoinedTrace(paths, stack).shape("a")
    paths = ranks(tmp_path, {"logits": random(6, 3)}, {})
    with pytest.raises(UserError, match=r"r1.*: logits: not in this rank \(join: concat:-1\)"):
        JoinedTrace(paths, stack).shape("logits")


def test_missing_and_damaged_files_are_one_line(tmp_path: Path, stack: ExitStack) -> None:
    with pytest.raises(UserError, match="no such file"):
        JoinedTrace([tmp_path / "none.safetensors"], stack)
    with pytest.raises(UserError, match="found no regular file, expected a trace"):
        JoinedTrace([tmp_path], stack)
    (tmp_path / "bad.safetensors").write_bytes(b"12345678nothing")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        JoinedTrace([tmp_path / "bad.safetensors"], stack)


def test_nobody_waits_for_the_writer_of_a_fifo(tmp_path: Path, stack: ExitStack) -> None:
    fifo = tmp_path / "theirs.safetensors"
    os.mkfifo(fifo)
    # With a writer the test ends in any case.
    stack.callback(os.close, os.open(fifo, os.O_RDWR))
    with pytest.raises(UserError, match="found no regular file, expected a trace"):
        JoinedTrace([fifo], stack)


def test_slices_cover_the_rows_once() -> None:
    assert list(slices(5, 10, 20)) == [(0, 2), (2, 4), (4, 5)]
    assert list(slices(2, 100, 20)) == [(0, 1), (1, 2)]
    assert list(slices(0, 4)) == []
