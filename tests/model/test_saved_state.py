"""A sequence on disk: what goes on behind it is what would have come without the file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4 import Engine, EngineConfig, SamplingParams, UserError
from dsv4.caches.filled import FilledRows
from dsv4.caches.state import DecodeState
from dsv4.checkpoint import state_file
from dsv4.checkpoint.state_file import SavedState, StoredTensor, map_tensor
from dsv4.config import ModelConfig
from dsv4.demo import CHECKPOINT
from dsv4.ops import TORCH
from dsv4.parallel.placement import Placement
from tests.model.test_state import THREE_LAYERS, poison
from tests.model.tiny import (
    CPU,
    direct,
    random_ids,
    random_weights,
    small_config,
    tiny_engine,
)

GREEDY = SamplingParams(temperature=0)
NO_STOP: frozenset[int] = frozenset()
IDS = random_ids(300)
# Around the window (128), windows of both compressors (4, 128) and chunks.
BORDERS = [1, 3, 4, 5, 126, 127, 128, 129, 130, 131, 255, 256, 257]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(max_context=320, prefill_chunk=64)


def following(engine: Engine, position: int, count: int = 5) -> torch.Tensor:
    return torch.cat([engine.decode([token]) for token in IDS[position:][:count]])


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_a_loaded_state_goes_on_bit_for_bit_on_both_sides_of_every_border(
    kv_dtype: str, tmp_path: Path
) -> None:
    cheap: dict[str, Any] = {"kv_dtype": kv_dtype, "compute_dtype": "bfloat16"}
    first = tiny_engine(THREE_LAYERS, max_context=320, prefill_chunk=64, **cheap)
    other = tiny_engine(THREE_LAYERS, max_context=1000, prefill_chunk=7, **cheap)
    for position in BORDERS:
        first.prefill(IDS[first.position : position])
        first.save_state(tmp_path / "state")
        poison(other)
        other.load_state(tmp_path / "state")
        assert other.token_ids == IDS[:position]
        other.save_state(tmp_path / "again")
        assert (tmp_path / "state").read_bytes() == (tmp_path / "again").read_bytes()
        behind = [following(engine, position, 3) for engine in (first, other)]
        assert torch.equal(*behind), position
        assert not behind[0].isnan().any()
        # As many tokens as were decoded ahead can still be taken back besides the longest draft.
        first.rewind(3)
        first.save_state(tmp_path / "state")
        poison(other)
        other.load_state(tmp_path / "state")
        undone = min(8, position)
        for engine in (first, other):
            assert engine.state.undoable_tokens == undone
            engine.rewind(undone)
        again = [following(engine, position - undone, undone + 3) for engine in (first, other)]
        assert torch.equal(*again), position
        first.rewind(3)


@pytest.mark.slow
def test_the_demo_goes_on_bit_for_bit_behind_512_tokens(tmp_path: Path) -> None:
    first = Engine.load(CHECKPOINT, EngineConfig(device="cpu", max_context=1024))
    settings = EngineConfig(device="cpu", max_context=2048, prefill_chunk=64)
    other = Engine.load(CHECKPOINT, settings)
    ids = random_ids(520, first.config.vocab_size)
    for position in (511, 512, 513):
        first.prefill(ids[first.position : position])
        first.save_state(tmp_path / "state")
        other.load_state(tmp_path / "state")
        for token in ids[position:][:4]:
            assert torch.equal(first.decode([token]), other.decode([token]))
        first.rewind(4)


def slots_ignored(self: FilledRows) -> Iterator[torch.Tensor]:
    """The fault: rows of a sequence from the first slot on, wherever the ring has them."""
    yield self.store[: min(self.count, len(self.store))]


@pytest.mark.slow
def test_spec11_j89_restored_rows_are_in_the_slots_of_their_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = small_config((4, 128, 0), 1, max_position_embeddings=16384)
    cheap: dict[str, Any] = {"kv_dtype": "fp8", "compute_dtype": "bfloat16", "max_context": 8448}
    first = tiny_engine(long, prefill_chunk=1024, **cheap)
    # Rings of other lengths, so that no row has the slot that it had.
    other = tiny_engine(long, prefill_chunk=90, **cheap)
    ids = random_ids(8200)
    for position in (511, 512, 513, 8191, 8192):
        first.prefill(ids[first.position : position])
        first.save_state(tmp_path / "state")
        poison(other)
        other.load_state(tmp_path / "state")
        for mine, theirs in zip(first.state.layers, other.state.layers, strict=True):
            rows = torch.arange(max(0, position - 128), position)
            found = theirs.keys.ring.read(rows % theirs.keys.ring.slots)
            assert torch.equal(found, mine.keys.ring.read(rows % mine.keys.ring.slots))
        expected = torch.cat([first.decode([token]) for token in ids[position:][:4]])
        assert not expected.isnan().any()
        for token, logits in zip(ids[position:], expected, strict=False):
            assert torch.equal(other.decode([token])[0], logits), position
        first.rewind(4)
    with monkeypatch.context() as patch:
        patch.setattr(FilledRows, "parts", slots_ignored)
        poison(other)
        other.load_state(tmp_path / "state")
    assert not torch.equal(other.decode([ids[8192]])[0], expected[0])


def placed(devices: list[torch.device]) -> Engine:
    """Layers in turns on ``devices``."""
    config = ModelConfig.from_dict(small_config())
    settings = EngineConfig(
        device="cpu", kv_dtype="bf16", compute_dtype="float32", max_context=320, prefill_chunk=64
    )
    placement = Placement.round_robin(config.num_hidden_layers, devices)
    table = direct(TORCH)
    return Engine(config, settings, random_weights(config), placement, table)


def test_layers_are_stored_by_their_index_whatever_device_they_are_on(tmp_path: Path) -> None:
    one = placed([CPU])
    several = placed([CPU, torch.device("cpu", 0)])
    assert len(several.state.devices) == 2
    for source, target in ((one, several), (several, one)):
        source.reset()
        source.prefill(IDS[:130])
        source.save_state(tmp_path / "state")
        target.load_state(tmp_path / "state")
        assert torch.equal(following(source, 130), following(target, 130))


@pytest.mark.slow
def test_a_generation_goes_on_behind_its_answer(engine: Engine, tmp_path: Path) -> None:
    ids = IDS[:20]
    answer = list(engine.generate(ids, 6, GREEDY, NO_STOP))
    engine.save_state(tmp_path / "state")
    assert SavedState.open(tmp_path / "state").token_ids == [*ids, *answer[:-1]]
    whole = [*ids, *answer, *IDS[100:110]]
    expected = list(engine.generate(whole, 6, GREEDY, NO_STOP))
    engine.load_state(tmp_path / "state")
    assert list(engine.generate(whole, 6, GREEDY, NO_STOP, reuse=True)) == expected
    stats = engine.last_run
    assert stats is not None
    assert (stats.reused_tokens, stats.prefill_tokens, stats.decode_tokens) == (25, 11, 5)


@pytest.mark.parametrize(
    ("shared", "reused"),
    [(20, 20), (19, 19), (12, 12), (11, 0), (0, 0)],
    ids=["all", "one taken back", "8 taken back", "9 taken back", "nothing"],
)
def test_what_is_reused_is_what_can_be_taken_back(shared: int, reused: int, engine: Engine) -> None:
    prompt = [*IDS[:shared], *random_ids(6, seed=3)]
    assert prompt[shared] != IDS[shared]
    expected = list(engine.generate(prompt, 4, GREEDY, NO_STOP))
    engine.reset()
    engine.prefill(IDS[:20])
    assert engine.reusable_tokens(prompt) == reused
    assert list(engine.generate(prompt, 4, GREEDY, NO_STOP, reuse=True)) == expected


@pytest.mark.parametrize("is_old", [False, True])
def test_what_a_file_has_no_rows_of_cannot_be_taken_back(
    is_old: bool, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight tokens, in how many steps they may be taken back; also behind a file that says of the
    sequence alone how far it came.
    """
    engine.reset()
    engine.prefill(IDS[:140])
    with monkeypatch.context() as patched:
        if is_old:
            patched.setattr(state_file, "kept_furthest", lambda position, furthest: furthest)
        engine.save_state(tmp_path / "state")
    engine.load_state(tmp_path / "state")
    for left in (8, 5, 2):
        assert engine.state.undoable_tokens == left
        engine.rewind(min(3, left))
    with pytest.raises(UserError, match="tokens: found 1"):
        engine.rewind(1)


def test_the_last_token_of_a_prompt_is_always_computed(engine: Engine) -> None:
    engine.reset()
    engine.prefill(IDS[:20])
    assert engine.reusable_tokens(IDS[:20]) == 19
    assert engine.reusable_tokens(IDS[:13]) == 12


def test_what_is_reused_of_an_iterator(engine: Engine) -> None:
    engine.reset()
    engine.prefill(IDS[:20])
    assert engine.reusable_tokens(iter(IDS[:20])) == 19
    assert engine.reusable_tokens([]) == 0


def test_the_engine_knows_its_tokens(engine: Engine) -> None:
    engine.logits(IDS[:5])
    engine.prefill(IDS[5:8])
    engine.rewind(2)
    engine.decode([7, 8])
    assert engine.token_ids == [*IDS[:6], 7, 8]
    run = engine.generate(IDS[:10], 6, GREEDY, NO_STOP)
    tokens = [next(run), next(run), next(run)]
    run.close()
    assert engine.token_ids == [*IDS[:10], *tokens][: engine.position]
    engine.trace(IDS[:4], ["hidden"])
    assert engine.token_ids == IDS[:4]
    engine.reset()
    assert engine.token_ids == []


def test_tokens_that_were_fed_past_the_engine_are_not_saved(engine: Engine, tmp_path: Path) -> None:
    engine.logits(IDS[:5])
    engine.steps.run([3])
    with pytest.raises(UserError, match="save_state: found 6 tokens, 5 of which"):
        engine.save_state(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_is_interrupted_leaves_no_tokens(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the caches are those of the file by then."""
    engine.reset()
    engine.prefill(IDS[:150])
    engine.save_state(tmp_path / "state")
    engine.reset()
    engine.prefill(IDS[150:290])
    read = []

    def interrupted(stored: StoredTensor) -> torch.Tensor:
        read.append(stored)
        if len(read) == 5:
            raise KeyboardInterrupt
        return map_tensor(stored)

    with monkeypatch.context() as patch:
        patch.setattr(state_file, "map_tensor", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.load_state(tmp_path / "state")
    assert (engine.position, engine.token_ids) == (0, [])
    engine.reset()
    engine.prefill(IDS[150:290])
    move = DecodeState._move

    def moved(state: DecodeState, position: int) -> None:
        move(state, position)
        if position == 150:
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(DecodeState, "_move", moved)
    with pytest.raises(KeyboardInterrupt):
        engine.load_state(tmp_path / "state")
    # All rows are there, and so are their ids.
    assert engine.token_ids == IDS[:150]
    engine.load_state(tmp_path / "state")
    assert engine.token_ids == IDS[:150]


@pytest.mark.parametrize("beyond", [-1, 12])
def test_a_state_that_says_it_came_where_it_cannot_have_come_is_refused(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    """Its checksum is right: another writer made it."""
    engine.reset()
    engine.prefill(IDS[:9])
    with monkeypatch.context() as patch:
        patch.setattr(state_file, "kept_furthest", lambda position, _: position + beyond)
        engine.save_state(tmp_path / "state")
    expected = f"furthest: found {9 + beyond}, expected an integer from 9 to 20"
    with pytest.raises(UserError, match=expected):
        engine.load_state(tmp_path / "state")
    assert engine.token_ids == IDS[:9]
