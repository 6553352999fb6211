"""``--save-state`` and ``--load-state`` of the driver."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4 import Engine, EngineConfig, SamplingParams, UserError
from dsv4.checkpoint.state_file import SavedState
from dsv4.demo import CHECKPOINT
from tests.driver.conftest import read_json
from tests.driver.drive import Drive

GREEDY = ("--temperature", 0, "--max-tokens", 12)


def answered(drive: Drive, folder: Path, *flags: object) -> dict[str, Any]:
    """The report of a greedy run of the demo, which says things that can be said again."""
    path = folder / "report.json"
    result = drive(*GREEDY, *flags, "--model", CHECKPOINT, "--json", path)
    assert result.code == 0, result.err
    return {**read_json(path), "stderr": result.err}


def reference(report: dict[str, Any], fed: list[list[int]]) -> list[int]:
    """The answer of an engine that was given the pieces of the whole conversation one by one, the
    last one as a prompt behind them.
    """
    engine = Engine.load(CHECKPOINT, EngineConfig(device="cpu"))
    *earlier, last = fed
    for piece in earlier:
        engine.prefill(piece)
    assert engine.token_ids + last == report["prompt"]["token_ids"]
    sampling = SamplingParams(temperature=0)
    ids = report["prompt"]["token_ids"]
    return list(engine.generate(ids, 12, sampling, reuse=True))


def test_raw_text_goes_on_behind_a_sequence_that_began_without_a_token_for_it(
    drive: Drive, tmp_path: Path
) -> None:
    ids = tmp_path / "ids"
    ids.write_text("[20, 30, 40]")
    state = tmp_path / "state"
    first = answered(drive, tmp_path, "--token-ids", ids, "--save-state", state)
    second = answered(drive, tmp_path, "--raw", "--prompt", " and", "--load-state", state)
    before = [20, 30, 40, *first["completion"]["token_ids"]]
    assert second["prompt"]["token_ids"][: len(before)] == before
    assert f"behind {len(before) - 1} reused" in second["stderr"]


@pytest.mark.slow
def test_the_next_turn_is_that_of_the_whole_conversation(drive: Drive, tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = answered(drive, tmp_path, "--prompt", "What is 3 + 4?", "--save-state", state)
    second = answered(
        drive, tmp_path, "--prompt", "And of France?", "--load-state", state, "--save-state", state
    )
    conversation = [
        {"role": "user", "content": "What is 3 + 4?"},
        first["completion"]["message"],
        {"role": "user", "content": "And of France?"},
    ]
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps(conversation))
    whole = answered(drive, tmp_path, "--messages", messages)
    assert second["prompt"] == whole["prompt"]
    assert second["completion"] == whole["completion"]
    before = first["prompt"]["token_ids"] + first["completion"]["token_ids"]
    assert second["timing"]["reused_tokens"] == len(before)
    assert len(before) + second["timing"]["prefill_tokens"] == len(whole["prompt"]["token_ids"])
    assert f"behind {len(before)} reused" in second["stderr"]
    assert (
        reference(
            second,
            [
                first["prompt"]["token_ids"],
                first["completion"]["token_ids"],
                whole["prompt"]["token_ids"][len(before) :],
            ],
        )
        == second["completion"]["token_ids"]
    )
    notes = json.loads(SavedState.open(state).notes["messages"])
    assert notes == [*conversation, second["completion"]["message"]]


@pytest.mark.slow
def test_an_answer_that_was_cut_off_loses_nothing(drive: Drive, tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = answered(drive, tmp_path, "--prompt", "Hi", "--save-state", state, "--max-tokens", 3)
    said = first["completion"]["token_ids"]
    before = [*first["prompt"]["token_ids"], *said]
    assert SavedState.open(state).token_ids == before[:-1]
    ids = tmp_path / "ids"
    ids.write_text("[5, 6]")
    behind = answered(drive, tmp_path, "--token-ids", ids, "--load-state", state)
    assert behind["prompt"]["token_ids"] == [*before, 5, 6]
    assert behind["timing"]["reused_tokens"] == len(before) - 1
    raw = answered(drive, tmp_path, "--prompt", " and", "--raw", "--load-state", state)
    assert raw["prompt"]["token_ids"][: len(before)] == before
    assert raw["prompt"]["text"].endswith(" and")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("The capital", "The capital"),
        ([{"type": "text", "text": "Sure."}, {"type": "text", "text": "The"}], "Sure.\n\nThe"),
    ],
)
def test_an_open_message_is_one_message_with_its_answer(
    drive: Drive, tmp_path: Path, content: object, text: str
) -> None:
    state = tmp_path / "state"
    asked = {"role": "user", "content": "What is the capital of France?"}
    begun = {"role": "assistant", "content": content, "wo_eos": True}
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([asked, begun]))
    first = answered(drive, tmp_path, "--messages", messages, "--save-state", state)
    notes = json.loads(SavedState.open(state).notes["messages"])
    whole = text + first["completion"]["message"]["content"]
    assert notes == [asked, {"role": "assistant", "content": whole, "tool_calls": []}]


@pytest.mark.slow
def test_reasoning_that_the_encoder_drops_is_no_part_of_the_state(
    drive: Drive, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    thinking = ("--thinking", "on")
    question = ("--prompt", "What is 3 + 4?", *thinking)
    first = answered(drive, tmp_path, *question, "--save-state", state)
    assert first["completion"]["message"]["reasoning_content"]
    asked = first["prompt"]["token_ids"]
    # All but <think>, which the encoder writes as </think> in the next prompt.
    saved = SavedState.open(state)
    assert saved.token_ids == asked[:-1]
    unprocessed = json.loads(saved.notes["unprocessed_token_ids"])
    assert unprocessed == [asked[-1], *first["completion"]["token_ids"]]
    second = answered(drive, tmp_path, "--prompt", "And 5 + 6?", *thinking, "--load-state", state)
    assert second["timing"]["reused_tokens"] == len(asked) - 1
    engine = Engine.load(CHECKPOINT, EngineConfig(device="cpu"))
    engine.prefill(asked)
    engine.rewind(1)
    ids = second["prompt"]["token_ids"]
    expected = list(engine.generate(ids, 12, SamplingParams(temperature=0), reuse=True))
    assert second["completion"]["token_ids"] == expected
    # Another beginning of the prompt leaves nothing to go on from.
    otherwise = ("--prompt", "Hi", *thinking, "--reasoning-effort", "max", "--load-state", state)
    report = answered(drive, tmp_path, *otherwise)
    assert f"--load-state: {state}: earlier turns read otherwise" in report["stderr"]
    assert "read otherwise" not in second["stderr"]
    quiet = answered(drive, tmp_path, *otherwise, "--quiet")
    assert (quiet["timing"]["reused_tokens"], quiet["stderr"]) == (0, "")
    assert report["timing"]["reused_tokens"] == 0
    assert report["timing"]["prefill_tokens"] == len(report["prompt"]["token_ids"])


def test_nothing_reads_otherwise_behind_an_empty_state(drive: Drive, tmp_path: Path) -> None:
    state = tmp_path / "state"
    Engine.load(CHECKPOINT, EngineConfig(device="cpu")).save_state(state, {"messages": "[]"})
    report = answered(drive, tmp_path, "--prompt", "Hi", "--load-state", state)
    assert report["timing"]["reused_tokens"] == 0
    assert "--load-state" not in report["stderr"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--load-state", "x"), "--load-state: found without a prompt"),
        (("--load-state", "x", "--prompt", "a", "--system", "b"), "--system: found together with"),
        (("--load-state", "x", "--prompt", "a", "--trace", "b"), "--trace: found together with"),
        (("--load-state", "x", "--prompt", "a", "--plan"), "--load-state: found together with"),
        (("--save-state", "x", "--plan"), "--save-state: found together with --plan"),
        (("--save-state", "-"), "--save-state: -: found no regular file"),
        (("--save-state", "/dev/null"), "--save-state: /dev/null: found no regular file"),
        (("--save-state", "/nonexistent/x"), "/nonexistent/x: its folder does not exist"),
        (("--load-state", "/nonexistent/x", "--prompt", "a"), "/nonexistent/x: cannot be read"),
        (("--load-state", "-", "--prompt", "a"), "-: cannot be read"),
    ],
)
def test_what_contradicts_is_refused(drive: Drive, flags: tuple[str, ...], message: str) -> None:
    drive(*flags).assert_user_error(message)


@pytest.mark.slow
def test_a_state_that_does_not_fit_is_refused_before_weights_are_read(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    assert drive("--prompt", "Hi", "--raw", "--max-tokens", 2, "--save-state", state).code == 0
    monkeypatch.setattr(Engine, "load", None)
    go_on = ("--prompt", "on", "--load-state", state)
    refused = drive(*go_on)
    refused.assert_user_error(f"{state}: found plain text, expected a conversation; a run")
    refused = drive(*go_on, "--raw", "--kv-dtype", "bf16")
    refused.assert_user_error(f"{state}: kv_rows: found 'fp8', expected 'bfloat16' (--kv-dtype)")
    refused = drive(*go_on, "--raw", "--model", CHECKPOINT)
    refused.assert_user_error(f"{state}: config.hidden_size: found", "expected")
    refused = drive(*go_on, "--raw", "--max-context", 1)
    refused.assert_user_error("--max-context: found")
    state.write_bytes(state.read_bytes()[:-1])
    drive(*go_on, "--raw").assert_user_error(f"{state}: truncated")


def test_an_interrupted_run_leaves_no_state(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "generate", interrupted)
    assert drive("--prompt", "Hi", "--save-state", tmp_path / "state").code == 130
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_be_written_costs_nothing_else(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise UserError("state: cannot be written (No space left on device)")

    monkeypatch.setattr(Engine, "save_state", full)
    report = tmp_path / "report.json"
    flags = ("--prompt", "Hi", "--max-tokens", 2, "--json", report)
    result = drive(*flags, "--save-state", tmp_path / "state")
    assert (result.code, result.err.splitlines()[-1][:13]) == (2, "error: state:")
    assert len(read_json(report)["completion"]["token_ids"]) == 2
