"""State files hold the rows of the draft module: behind one an engine with the same module makes
the drafts of its writer, one with another module none before it knows the window.
"""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dsv4 import Engine
from dsv4.caches.draft import DraftState
from dsv4.checkpoint import state_file
from dsv4.speculative.drafter import Proposal
from dsv4.speculative.steps import DraftedSteps
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import random_ids
from tests.speculative.models import KINDS, WINDOW, drafted_engine, plain_engine
from tests.speculative.scripted import GREEDY, NO_STOPS

IDS = random_ids(540)


def draft_of(engine: Engine) -> DraftState:
    assert engine.state.draft is not None
    return engine.state.draft


@torch.inference_mode()
def proposal(engine: Engine) -> Proposal:
    """Drafts behind the next token of the sequence."""
    assert isinstance(engine.steps, DraftedSteps)
    position = engine.position
    choose = lambda logits_V, _: logits_V.argmax()  # noqa: E731
    return engine.steps.drafter.propose(IDS[position], position, 5, choose)


def poisoned(engine: Engine) -> Engine:
    """With what another sequence has left, which no rows of a file may be taken for."""
    engine.prefill(random_ids(90, seed=4))
    return engine


def names(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        found = set(file.keys())
    return {name for name in found if name.startswith("draft.")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_spec11_j89_drafts_behind_a_loaded_state_are_those_of_its_writer(
    kind: MtpKind, tmp_path: Path
) -> None:
    first = drafted_engine(kind, max_context=600)
    other = poisoned(drafted_engine(kind, max_context=560, prefill_chunk=7))
    for position in (511, 512, 513):
        first.prefill(IDS[first.position : position])
        first.save_state(tmp_path / "state")
        other.load_state(tmp_path / "state")
        other.save_state(tmp_path / "again")
        assert (tmp_path / "state").read_bytes() == (tmp_path / "again").read_bytes()
        for taken_back in (0, 8):
            for engine in (first, other):
                engine.rewind(taken_back)
                assert draft_of(engine).covers(engine.position)
            ends = other.position + 3
            while other.position < ends:
                expected, found = proposal(first), proposal(other)
                assert found.tokens == expected.tokens
                assert torch.equal(found.logits_NV, expected.logits_NV)
                for engine in (first, other):
                    engine.decode([IDS[engine.position]])


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_behind_tokens_that_are_taken_back_from_a_file(
    kind: MtpKind, tmp_path: Path
) -> None:
    first = drafted_engine(kind)
    first.prefill(IDS[:40])
    first.save_state(tmp_path / "state")
    other = poisoned(drafted_engine(kind))
    other.load_state(tmp_path / "state")
    for engine in (first, other):
        engine.rewind(8)
        assert draft_of(engine).covers(32)
    expected, found = proposal(first), proposal(other)
    assert found.tokens == expected.tokens
    assert torch.equal(found.logits_NV, expected.logits_NV)
    assert torch.equal(other.decode([IDS[32]]), first.decode([IDS[32]]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_with_drafts_behind_a_file(kind: MtpKind, tmp_path: Path) -> None:
    first = drafted_engine(kind)
    first.prefill(IDS[:40])
    first.save_state(tmp_path / "state")
    other = poisoned(drafted_engine(kind))
    other.load_state(tmp_path / "state")
    expected = list(plain_engine(kind).generate(IDS[:45], 9, GREEDY, NO_STOPS))
    assert list(other.generate(IDS[:45], 9, GREEDY, NO_STOPS, reuse=True)) == expected
    assert other.last_run is not None
    assert other.last_run.drafts is not None
    assert other.last_run.drafts.drafted[0] >= other.last_run.drafts.steps - 1


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_of_no_use_to_another_module_or_to_none(kind: MtpKind, tmp_path: Path) -> None:
    writer = drafted_engine(kind)
    writer.prefill(IDS[:40])
    writer.save_state(tmp_path / "state")
    assert names(tmp_path / "state")
    retrained = drafted_engine(kind)
    draft_of(retrained).module = "another"
    other_kind: MtpKind = "dspark" if kind == "classic" else "classic"
    expected = writer.decode([IDS[40]])
    for engine in (retrained, drafted_engine(other_kind), plain_engine(kind)):
        poisoned(engine).load_state(tmp_path / "state")
        assert engine.state.draft is None or not draft_of(engine).covers(40)
        assert torch.equal(engine.decode([IDS[40]]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_rows_is_drafted_for_once_the_window_is_known(
    kind: MtpKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of the format that had none, and no rows are written that are not there."""
    writer = plain_engine(kind)
    writer.prefill(IDS[:30])
    for format in (state_file.FORMAT, "dsv4-state/1"):
        with monkeypatch.context() as patched:
            patched.setattr(state_file, "FORMAT", format)
            writer.save_state(tmp_path / "state")
        engine = drafted_engine(kind)
        # As long as what is in the file: only its tokens tell it from this one.
        engine.prefill(random_ids(30, seed=4))
        engine.load_state(tmp_path / "state")
        known = [draft_of(engine).covers(30)]
        for position in range(30, 30 + WINDOW + 2):
            engine.decode([IDS[position]])
            known.append(draft_of(engine).covers(engine.position))
        assert known == [False] * WINDOW + [True] * 3
        engine.save_state(tmp_path / "known")
        # Eight tokens can be taken back, behind which drafts would read rows before the file's end.
        assert not names(tmp_path / "known")
        engine.prefill(IDS[engine.position :][:8])
        engine.save_state(tmp_path / "known")
        assert names(tmp_path / "known")
