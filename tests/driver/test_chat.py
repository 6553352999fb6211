"""A chat of ``--interactive``: its turns feed what is new, and nothing else than a run that is fed
the same would have computed.
"""

import json
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dsv4 import Engine, EngineConfig, UserError
from dsv4.cli.chat.chat import Chat
from dsv4.cli.chat.stop import AnswerStopped, StopRequest
from dsv4.cli.prompt import opening
from dsv4.cli.stream import ChatPrinter
from dsv4.command.signals import Stopped
from dsv4.demo import CHECKPOINT
from dsv4.step.chunks import PromptChunks
from tests.driver.chats import Turn, arguments_of, assert_exact, new_chat
from tests.source_rules import ROOT

pytestmark = pytest.mark.slow

TOOLS = str(ROOT / "docs" / "examples" / "weather.json")
THINKING = ("--thinking", "on")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(CHECKPOINT, EngineConfig(device="cpu", max_context=1024))


@pytest.fixture(scope="module")
def other() -> Engine:
    return Engine.load(CHECKPOINT, EngineConfig(device="cpu", max_context=1024))


def turns_of(chat: Chat, engine: Engine, lines: list[str]) -> list[Turn]:
    turns = []
    for line in lines:
        chat.tell(line)
        turns.append(Turn.last(chat, engine))
    return turns


@pytest.mark.parametrize("flags", [(), THINKING], ids=["chat", "thinking"])
def test_three_turns_feed_what_is_new(
    engine: Engine, other: Engine, flags: tuple[str, ...]
) -> None:
    chat = new_chat(engine, *flags)
    turns = turns_of(chat, engine, ["What is 3 + 4?", "What is 29 + 27 - 4?", "And of France?"])
    for before, turn in pairwise(turns):
        # Reasoning is dropped, and with it the <think> at the end of the prompt.
        kept = len(before.prompt) - 1 if flags else len(before.prompt + before.answer)
        assert turn.reused == kept
    roles = [message["role"] for message in chat.messages]
    assert roles == ["user", "assistant"] * 3
    assert_exact(engine, other, turns)


@pytest.mark.parametrize("flags", [(), THINKING], ids=["chat", "thinking"])
def test_a_tool_is_called_and_its_result_typed(
    engine: Engine, other: Engine, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = arguments_of("--tools", TOOLS)
    chat = new_chat(engine, *flags, "--max-tokens", "64", messages=opening(arguments))
    turns = turns_of(chat, engine, ["How is the weather in Rome?"])
    assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in capsys.readouterr().out
    assert [call["function"]["name"] for call in chat.open_calls] == ["get_weather"]
    turns += turns_of(chat, engine, ['{"temperature": 21}'])
    assert "21" in chat.messages[-1]["content"]
    assert chat.open_calls == []
    turns += turns_of(chat, engine, ["What is 3 + 4?"])
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    for before, turn in pairwise(turns):
        assert turn.reused == len(before.prompt + before.answer)
    assert_exact(engine, other, turns)


def test_results_are_asked_for_until_every_call_has_one(engine: Engine) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "A"}'}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    question = {"role": "user", "content": "How is the weather?"}
    chat = new_chat(engine, messages=[question, calls])
    assert len(chat.open_calls) == 2
    chat.tell("21")
    with pytest.raises(UserError):
        chat.tell("word " * 2000)  # The result before it stays.
    assert len(chat.open_calls) == 1
    assert len(chat.messages) == 2
    chat.tell("22")
    assert [message["content"] for message in chat.messages[2:4]] == ["21", "22"]
    assert chat.messages[4]["role"] == "assistant"


def test_a_chat_that_is_saved_between_two_results_goes_on_with_the_second(
    engine: Engine, other: Engine, tmp_path: Path
) -> None:
    names = ("get_weather", "get_time")
    calls = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    asked = [
        {"role": "user", "content": "How is the weather, and when?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    chat = new_chat(engine, messages=asked)
    chat.tell("21")
    chat.save(tmp_path / "state")
    loaded = new_chat(other)
    loaded.load(tmp_path / "state")
    for one in (chat, loaded):
        assert [call["function"]["name"] for call in one.open_calls] == ["get_time"]
        one.tell("noon")
    assert loaded.messages == chat.messages
    assert loaded.token_ids == chat.token_ids
    roles = [message["role"] for message in loaded.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]


def test_an_answer_that_the_encoder_writes_otherwise_is_read_again(
    engine: Engine, other: Engine
) -> None:
    chat = new_chat(engine)
    turns = turns_of(chat, engine, ["What is 3 + 4?", "What is the capital of France?"])
    chat.messages[-1]["content"] = "It is Rome."  # As a repaired tool call reads otherwise.
    turns += turns_of(chat, engine, ["And of Italy?"])
    assert turns[2].reused == len(turns[1].prompt)
    assert_exact(engine, other, turns)


def stop_at(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the piece of this number is shown."""
    feed = ChatPrinter.feed
    fed = []

    def stopping(self: ChatPrinter, text: str) -> None:
        fed.append(text)
        if len(fed) == piece:
            signal.raise_signal(signal.SIGINT)
        feed(self, text)

    monkeypatch.setattr(ChatPrinter, "feed", stopping)


def test_ctrl_c_ends_an_answer_which_stays_as_far_as_it_was_shown(
    engine: Engine,
    other: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = new_chat(engine)
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        stop_at(4, patch)
        turns = turns_of(chat, engine, ["What is the capital of France?"])
    written = capsys.readouterr()
    assert len(turns[0].answer) == 4
    assert written.out.strip()
    assert chat.messages[-1]["content"] == written.out.removesuffix("\n")
    assert written.err.endswith("interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before
    turns += turns_of(chat, engine, ["What is 3 + 4?"])
    assert turns[1].reused == len(turns[0].prompt) + 3  # The fourth token was not yet read.
    assert_exact(engine, other, turns)


@pytest.mark.parametrize("flags", [(), THINKING], ids=["before a word", "while reasoning"])
def test_without_a_word_of_the_answer_the_question_is_forgotten(
    engine: Engine,
    other: Engine,
    flags: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = new_chat(engine, *flags)
    turns = turns_of(chat, engine, ["What is 3 + 4?"])
    kept = list(chat.messages)
    with monkeypatch.context() as patch:
        if flags:
            stop_at(3, patch)
        else:
            bar: Any = lambda *_: signal.raise_signal(signal.SIGINT)  # noqa: E731
            patch.setattr("dsv4.cli.chat.chat.ProgressBar.__call__", bar)
        monkeypatch.setattr(engine, "prompt_chunks", PromptChunks(5, 1))
        chat.tell("What is the capital of France?")
    monkeypatch.undo()
    assert "the answer has no word yet, so the question is forgotten" in capsys.readouterr().err
    assert chat.messages == kept
    turns += turns_of(chat, engine, ["What is 29 + 27 - 4?"])
    assert turns[1].reused > 0
    assert_exact(engine, other, turns)


def test_an_answer_without_a_word_that_has_ended_stays(engine: Engine) -> None:
    chat = new_chat(engine)
    chat.tell("What is 3 + 4?")
    first_word = chat.messages[-1]["content"].split()[0]
    chat = new_chat(engine, "--stop", first_word)
    chat.tell("What is 3 + 4?")
    assert [message["content"] for message in chat.messages] == ["What is 3 + 4?", ""]


def test_a_second_ctrl_c_does_not_wait() -> None:
    with StopRequest() as stop:
        stop.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(AnswerStopped):
            stop.check()
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGINT)


def test_a_saved_chat_goes_on_as_if_it_had_not_ended(
    engine: Engine, other: Engine, tmp_path: Path
) -> None:
    chat = new_chat(engine, *THINKING)
    chat.set_system("You are a calculator.")
    turns = turns_of(chat, engine, ["What is 3 + 4?"])
    chat.save(tmp_path / "state")
    loaded = new_chat(other, *THINKING)
    loaded.load(tmp_path / "state")
    assert loaded.messages == chat.messages
    assert other.token_ids == turns[0].prompt[:-1]
    for one in (chat, loaded):
        one.tell("What is 29 + 27 - 4?")
    assert loaded.token_ids == chat.token_ids
    turns += [Turn.last(loaded, other)]
    assert turns[1].reused == len(turns[0].prompt) - 1
    assert_exact(other, engine, turns)


def test_reset_and_system(engine: Engine) -> None:
    chat = new_chat(engine, messages=opening(arguments_of("--system", "A.", "--tools", TOOLS)))
    tools = chat.messages[0]["tools"]
    chat.tell("What is 3 + 4?")
    chat.set_system("B.")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[0] == {"role": "system", "content": "B.", "tools": tools}
    chat.tell("What is 3 + 4?")
    assert engine.last_run is not None
    assert engine.last_run.reused_tokens == 0
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "B.", "tools": tools}]
    assert (engine.position, chat.token_ids) == (0, [])


def test_system_and_reset_keep_the_tools_of_a_developer(engine: Engine) -> None:
    tools = opening(arguments_of("--tools", TOOLS))[0]["tools"]
    developer = {"role": "developer", "content": "A.", "tools": tools}
    chat = new_chat(engine, messages=[developer, {"role": "user", "content": "What is 3 + 4?"}])
    chat.set_system("B.")
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "B."}, developer]


def test_a_turn_that_fails_leaves_the_chat_as_it_was(
    engine: Engine, other: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = new_chat(engine)
    turns = turns_of(chat, engine, ["What is 3 + 4?"])
    kept = list(chat.messages)
    (tmp_path / "messages").write_text(json.dumps(kept))

    def nan(*_: object, **__: object) -> None:
        engine.reset()
        raise FloatingPointError("NaN in logits")

    wrong: dict[type[Exception], Callable[[], None]] = {
        UserError: lambda: chat.tell("word " * 2000),
        FloatingPointError: lambda: (monkeypatch.setattr(engine, "generate", nan), chat.tell("a"))[
            1
        ],
    }
    for error, work in wrong.items():
        with pytest.raises(error):
            work()
        monkeypatch.undo()
        assert chat.messages == kept
    with pytest.raises(UserError, match=f"{tmp_path}/absent: cannot be read"):
        chat.load(tmp_path / "absent")
    other.reset()
    other.prefill([5, 6])
    other.save_state(tmp_path / "text")
    with pytest.raises(UserError, match=f"^/load: {tmp_path}/text: found plain text, expected a"):
        chat.load(tmp_path / "text")
    other.save_state(tmp_path / "odd", {"messages": '[{"content": "a"}]'})
    with pytest.raises(UserError, match=r"^/load: .*/odd: notes.messages\[0\].role is None, exp"):
        chat.load(tmp_path / "odd")
    with pytest.raises(UserError, match="lone surrogate"):
        chat.tell("\ud800")
    turns = turns_of(chat, engine, ["What is the capital of France?"])
    assert turns[0].reused == 0
    assert_exact(engine, other, turns)
