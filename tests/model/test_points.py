"""Points of a sequence: what is fed behind one that was gone back to is what would have come if
nothing had ever been behind it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4 import Engine, SamplingParams
from dsv4.caches import point
from dsv4.caches.point import _ring_parts
from dsv4.caches.state import MAX_POINTS
from tests.model.test_state import DEFAULT_DTYPES, THREE_LAYERS
from tests.model.tiny import random_ids, tiny_engine

GREEDY = SamplingParams(temperature=0)
NO_STOP: frozenset[int] = frozenset()
IDS = random_ids(300)
OTHERS = random_ids(300, seed=1)
# On both sides of the windows of attention (128) and of both compressors (4, 128).
PLACES = [1, 5, 127, 128, 130, 257]


def small_engine(**settings: Any) -> Engine:
    return tiny_engine(THREE_LAYERS, max_context=640, prefill_chunk=64, **settings)


def points(engine: Engine) -> list[int]:
    return [point.position for point in engine.state.points]


def behind(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Logits of a prompt of 70 tokens, in two chunks, and of single tokens behind it."""
    prompt = engine.prefill(ids[:70])
    return torch.cat([prompt[None], *(engine.decode([token]) for token in ids[70:74])])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [DEFAULT_DTYPES, {}], ids=["fp8", "plain float32"])
def test_behind_a_point_is_what_would_have_been_there_at_once(settings: dict[str, Any]) -> None:
    gone = small_engine(**settings)
    straight = small_engine(**settings)
    for place in PLACES:
        for taken_back in {0, 1, min(8, place)}:
            for engine in (gone, straight):
                engine.reset()
                engine.prefill(IDS[:place])
            gone.state.keep_point()
            # Longer than the rings: nothing that they held is left.
            gone.prefill(OTHERS[:220])
            gone.rewind_to(place - taken_back)
            assert gone.token_ids == IDS[: place - taken_back]
            straight.rewind(taken_back)
            assert gone.state.undoable_tokens == min(8, place) - taken_back
            found = [behind(engine, IDS[place:]) for engine in (gone, straight)]
            assert torch.equal(*found), (place, taken_back)


def test_what_a_point_holds_no_rows_of_cannot_be_taken_back() -> None:
    """Eight tokens before it are the last ones, in how many steps they may be taken back."""
    engine = small_engine()
    engine.prefill(IDS[:140])
    engine.state.keep_point()
    engine.prefill(OTHERS[:220])
    engine.rewind_to(135)
    engine.state.keep_point()
    assert engine.state.undoable_tokens == 3
    engine.prefill(OTHERS[:220])
    engine.rewind_to(132)
    assert engine.state.undoable_tokens == 0
    with pytest.raises(ValueError, match="position: found 131"):
        engine.rewind_to(131)


def test_the_beginning_needs_no_point() -> None:
    engine = small_engine()
    engine.prefill(IDS[:140])
    nothing = engine.reusable_tokens(OTHERS)
    assert nothing == 0
    engine.rewind_to(nothing)
    assert (engine.position, engine.token_ids) == (0, [])
    assert torch.equal(engine.prefill(OTHERS[:20]), small_engine().prefill(OTHERS[:20]))


def test_a_point_is_gone_once_the_sequence_was_before_it(tmp_path: Path) -> None:
    engine = small_engine()
    engine.prefill(IDS[:20])
    engine.state.keep_point()
    engine.state.keep_point()
    assert points(engine) == [20]
    engine.decode(IDS[20:24])
    engine.state.keep_point()
    engine.save_state(tmp_path / "state")
    engine.rewind(4)
    assert points(engine) == [20]
    engine.rewind(1)
    assert points(engine) == []
    for begin_again in (engine.reset, lambda: engine.load_state(tmp_path / "state")):
        engine.prefill([7])
        engine.state.keep_point()
        assert points(engine) == [engine.position]
        begin_again()
        assert points(engine) == []


def test_the_latest_points_are_kept_and_others_cannot_be_reached() -> None:
    engine = small_engine()
    for token in range(10, 22):
        engine.prefill([token] * 20)
        engine.state.keep_point()
    assert points(engine) == [20 * n for n in range(13 - MAX_POINTS, 13)]
    assert engine.state.reachable(175) == 175
    assert engine.state.reachable(205) == 200
    assert engine.state.reachable(150) == 0
    with pytest.raises(ValueError, match="position: found 190, expected one that 240 tokens"):
        engine.rewind_to(190)
    assert (engine.position, len(points(engine))) == (240, MAX_POINTS)


@pytest.mark.slow
def test_a_generation_can_come_back_to_its_prompt_from_behind_any_answer() -> None:
    engine = small_engine()
    straight = small_engine()
    first = IDS[:30]
    list(engine.generate(first, 210, GREEDY, NO_STOP, reuse=True))
    second = [*IDS[:29], *OTHERS[:100]]
    assert engine.reusable_tokens(second) == 29
    answer = list(engine.generate(second, 8, GREEDY, NO_STOP, reuse=True))
    assert engine.last_run is not None
    assert (engine.last_run.reused_tokens, engine.last_run.prefill_tokens) == (29, 100)
    assert points(engine) == [29, 129]
    straight.prefill(first)
    assert list(straight.generate(second, 8, GREEDY, NO_STOP, reuse=True)) == answer
    # An answer that is not to be kept by anybody costs nothing.
    list(engine.generate(second, 2, GREEDY, NO_STOP))
    assert points(engine) == []


def test_a_prompt_that_was_stopped_leaves_what_was_before_it() -> None:
    engine = small_engine()
    answer = list(engine.generate(IDS[:30], 40, GREEDY, NO_STOP, reuse=True))
    said = [*IDS[:30], *answer]

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(engine.generate([*said, *OTHERS], 5, GREEDY, NO_STOP, stop, reuse=True))
    assert engine.position == len(said) - 1 + 64
    assert engine.reusable_tokens([*said, *IDS]) == len(said) - 1


def test_going_back_that_is_interrupted_leaves_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rings are those of the point by then."""
    engine = small_engine()
    list(engine.generate(IDS[:40], 60, GREEDY, NO_STOP, reuse=True))
    parts = []

    def interrupted(*given: Any) -> Any:
        for part in _ring_parts(*given):
            if len(parts) == 5:
                raise KeyboardInterrupt
            parts.append(part)
            yield part

    with monkeypatch.context() as patch:
        patch.setattr(point, "_ring_parts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.rewind_to(40)
    assert (engine.position, engine.token_ids, points(engine)) == (0, [], [])
    assert engine.reusable_tokens(IDS[:50]) == 0
    engine.prefill(IDS[:9])
    assert engine.token_ids == IDS[:9]
