"""State files: what is in them, and what is refused with the engine left as it was."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dsv4 import Engine, EngineConfig, SamplingParams, UserError
from dsv4.caches.filled import filled_rows
from dsv4.caches.state import DecodeState
from dsv4.checkpoint import open_checkpoint, shard, write_synthetic
from dsv4.checkpoint.geometries import Geometry, geometry_config
from dsv4.checkpoint.identity import checkpoint_identity
from dsv4.checkpoint.state_file import FORMAT, SavedState, StateKey
from dsv4.config import ModelConfig
from dsv4.demo import CHECKPOINT
from tests.model.tiny import CPU, random_ids, raw_config, small_config, tiny_engine

GREEDY = SamplingParams(temperature=0)
NO_STOP: frozenset[int] = frozenset()
IDS = random_ids(20)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(max_context=320, prefill_chunk=64)


@pytest.fixture(scope="module")
def saved(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state behind 9 tokens, which has something of everything but of HCA entries."""
    path = tmp_path_factory.mktemp("state") / "nine"
    engine.reset()
    engine.prefill(IDS[:9])
    engine.save_state(path, {"a note": "é\n"})
    return path


def test_the_file_is_safetensors_and_says_what_it_is(saved: Path) -> None:
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
        assert file.get_tensor("token_ids").tolist() == IDS[:9]
        assert file.get_tensor("layers.1.compressed.data").shape[0] == 2
        assert file.get_tensor("layers.2.compressed.data").shape[0] == 0
        names = set(file.keys())
    state = json.loads(metadata["state"])
    assert metadata["format"] == FORMAT
    assert (state["kv_rows"], state["index_rows"]) == ("float32", "float32")
    assert state["config"]["num_hidden_layers"] == 4
    assert {name.split(".")[2] for name in names if name.startswith("layers.0")} == {"window"}
    assert SavedState.open(saved).notes == {"a note": "é\n"}


@pytest.mark.parametrize(
    ("name", "fixed", "token"), [("v4-flash", 17996992, 3850.25), ("v4-pro", 27028800, 5511.4375)]
)
def test_what_a_state_of_a_published_geometry_takes(
    name: Geometry, fixed: int, token: float
) -> None:
    """The numbers of decode.md, in bytes; a token id takes another 8. A point takes what does not
    depend on the length.
    """
    config = ModelConfig.from_dict(geometry_config(name))
    devices = (CPU,) * config.num_hidden_layers
    state = DecodeState.allocate(config, EngineConfig(), 4096, devices, planned=True)
    first, second = (
        sum(
            one.count * one.shape[1] * one.store.itemsize
            for one in filled_rows(state.layers, position, 8)
        )
        for position in (2048, 4096)
    )
    assert (second - first) / 2048 == token
    assert first - 2048 * token == fixed
    in_ring = [one for one in filled_rows(state.layers, 4096, 8) if one.in_ring]
    assert sum(one.count * one.shape[1] * one.store.itemsize for one in in_ring) == fixed


def refused(engine: Engine, path: Path) -> str:
    """The message of a refused load, behind which the engine is as it was before."""
    engine.reset()
    engine.prefill(IDS[:6])
    expected = engine.decode([5])
    engine.rewind(1)
    with pytest.raises(UserError) as error:
        engine.load_state(path)
    message = str(error.value)
    assert "\n" not in message
    assert str(path) in message
    assert engine.token_ids == IDS[:6]
    assert torch.equal(engine.decode([5]), expected)
    return message


def test_every_byte_counts(engine: Engine, saved: Path, tmp_path: Path) -> None:
    raw = saved.read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    damaged = tmp_path / "damaged"
    # All of the header's beginning, with the checksum, then samples of the rest.
    places = [*range(200), *range(200, header, 37), *range(header, len(raw), 1009), len(raw) - 1]
    for place in places:
        found = bytearray(raw)
        found[place] ^= 1 << place % 8
        damaged.write_bytes(found)
        with pytest.raises(UserError) as error:
            SavedState.open(damaged)
        assert str(damaged) in str(error.value), place
        assert "\n" not in str(error.value), place
    damaged.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert "damaged: its SHA-256" in refused(engine, damaged)


@pytest.mark.parametrize("length", [0, 7, 8, 100, -1000, -1])
def test_a_cut_file_is_refused(engine: Engine, saved: Path, tmp_path: Path, length: int) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(saved.read_bytes()[:length])
    assert "truncated" in refused(engine, cut)


def test_what_is_no_state_is_refused(engine: Engine, saved: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    longer.write_bytes(saved.read_bytes() + b"x")
    assert "bytes after the last tensor" in refused(engine, longer)
    assert "cannot be read (No such file" in refused(engine, tmp_path / "absent")
    assert "not a regular file" in refused(engine, tmp_path)
    older = tmp_path / "older"
    older.write_bytes(saved.read_bytes().replace(FORMAT.encode(), b"dsv4-state/0"))
    assert f"format: found 'dsv4-state/0', expected '{FORMAT}'" in refused(engine, older)
    model = CHECKPOINT / "model.safetensors"
    assert f"expected '{FORMAT}'" in refused(engine, model)


OTHERS: dict[str, tuple[Callable[[], Engine], str]] = {
    "geometry": (
        lambda: tiny_engine(small_config((0, 4, 128)), max_context=64),
        "config.num_hidden_layers: found 4, expected 3",
    ),
    "kv dtype": (
        lambda: tiny_engine(kv_dtype="fp8", max_context=64),
        "kv_rows: found 'float32', expected 'fp8' (EngineConfig.kv_dtype)",
    ),
    "index dtype": (
        lambda: tiny_engine(index_dtype="fp8", max_context=64),
        "index_rows: found 'float32', expected 'fp8' (EngineConfig.index_dtype)",
    ),
    "compute dtype": (
        lambda: tiny_engine(compute_dtype="bfloat16", max_context=64),
        "kv_rows: found 'float32', expected 'bfloat16' (EngineConfig.kv_dtype)",
    ),
    "context": (
        lambda: tiny_engine(max_context=8),
        "found 9 tokens, expected at most 8 (EngineConfig.max_context)",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_state_of_something_else_is_refused(what: str, saved: Path) -> None:
    make, message = OTHERS[what]
    assert refused(make(), saved).endswith(message)


def test_index_rows_are_named_by_what_they_hold() -> None:
    """No ``index_dtype`` is that of the other rows: such states belong to each other."""
    config = ModelConfig.from_dict(small_config())
    followed = StateKey.of(config, EngineConfig(kv_dtype="fp8", index_dtype=None), "")
    assert followed == StateKey.of(config, EngineConfig(kv_dtype="fp8", index_dtype="fp8"), "")


def test_a_refused_load_does_not_end_a_generation(
    engine: Engine, saved: Path, tmp_path: Path
) -> None:
    expected = list(engine.generate(IDS[:6], 4, GREEDY, NO_STOP))
    run = engine.generate(IDS[:6], 4, GREEDY, NO_STOP)
    tokens = [next(run)]
    with pytest.raises(UserError):
        engine.load_state(tmp_path)
    assert [*tokens, *run] == expected
    run = engine.generate(IDS[:6], 4, GREEDY, NO_STOP)
    next(run)
    engine.load_state(saved)
    with pytest.raises(RuntimeError, match="used for something else"):
        next(run)
    assert engine.token_ids == IDS[:9]


def test_a_context_may_be_full_of_a_state(saved: Path) -> None:
    full = tiny_engine(max_context=9)
    full.load_state(saved)
    assert full.token_ids == IDS[:9]


def checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    write_synthetic(folder, raw_config((0, 4, 128), **changes), "f32", seed)
    return folder


def test_a_checkpoint_is_known_by_what_it_holds(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", max_context=64)
    first = Engine.load(checkpoint(tmp_path / "a"), config)
    first.prefill(IDS[:9])
    first.save_state(tmp_path / "state")
    moved = Engine.load((tmp_path / "a").rename(tmp_path / "elsewhere"), config)
    moved.load_state(tmp_path / "state")
    assert torch.equal(moved.decode([3]), first.decode([3]))
    other = Engine.load(checkpoint(tmp_path / "b", seed=1), config)
    assert ": checkpoint: found '" in refused(other, tmp_path / "state")
    names = {checkpoint_identity(open_checkpoint(tmp_path / name)) for name in ("elsewhere", "b")}
    assert len(names) == 2


def test_a_file_appears_whole_or_not_at_all(
    engine: Engine, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    path.write_text("before")
    path.chmod(0o600)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    engine.load_state(saved)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.save_state(path)
    assert (path.read_text(), [*tmp_path.iterdir()]) == ("before", [path])
    with monkeypatch.context() as patch:
        usage = type("Usage", (), {"free": saved.stat().st_size // 2})
        patch.setattr("dsv4.checkpoint.writer.shutil.disk_usage", lambda _: usage)
        with pytest.raises(UserError, match=r"state: found \S+ GB free, expected at least"):
            engine.save_state(path)
    assert path.read_text() == "before"
    engine.save_state(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert SavedState.open(path).token_ids == IDS[:9]
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("path", "message"),
    [("", "found no regular file"), ("absent/state", "no such folder")],
)
def test_a_path_that_cannot_be_a_file_is_refused(
    engine: Engine, tmp_path: Path, path: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        engine.save_state(tmp_path / path)


@pytest.mark.parametrize("notes", [{"a": 1}, {"a": None}, {"a": b"x"}, {1: "a"}, "text", ["a"]])
def test_notes_that_could_not_be_read_again_are_refused(
    engine: Engine, tmp_path: Path, notes: Any
) -> None:
    path = tmp_path / "state"
    path.write_text("before")
    with pytest.raises(UserError, match=r"notes: found .*, expected an object of strings$"):
        engine.save_state(path, notes)
    assert path.read_text() == "before"


@pytest.mark.parametrize(
    ("name", "what"), [("MAX_HEADER_BYTES", "bytes"), ("MAX_HEADER_VALUES", "JSON values")]
)
def test_notes_that_are_too_long_to_be_read_again_are_refused(
    engine: Engine,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    what: str,
) -> None:
    engine.load_state(saved)
    path = tmp_path / "state"
    path.write_text("before")
    monkeypatch.setattr(shard, name, 100_000)
    with pytest.raises(UserError, match=f"header: found 1[0-9]+ {what}, expected at most 100000$"):
        engine.save_state(path, {"a note": "," * 100_000})
    assert path.read_text() == "before"


def test_tensors_that_are_not_those_of_the_state_are_refused(engine: Engine, saved: Path) -> None:
    state = SavedState.open(saved)
    for wrong in (replace(state, furthest=20), replace(state, token_ids=IDS[:8])):
        with pytest.raises(UserError, match="found .* expected"):
            wrong.check_rows(engine.state)


def test_a_sequence_that_has_met_nan_is_not_saved(engine: Engine, tmp_path: Path) -> None:
    engine.logits(IDS[:5])
    engine.state.nan_1.fill_(1)
    with pytest.raises(UserError, match="met NaN"):
        engine.save_state(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []
