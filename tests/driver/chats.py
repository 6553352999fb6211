"""Chats with the demo on one engine, and what their turns have fed."""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4 import Engine
from dsv4.cli.arguments import parse_arguments
from dsv4.cli.chat.chat import Chat
from dsv4.cli.job import ModelFiles
from dsv4.demo import CHECKPOINT

GREEDY = ("--interactive", "--temperature", "0", "--max-tokens", "24")


def arguments_of(*flags: str) -> argparse.Namespace:
    return parse_arguments([*GREEDY, *flags])


def new_chat(engine: Engine, *flags: str, messages: list[dict] | None = None) -> Chat:
    """A chat at its beginning."""
    engine.reset()
    return Chat(arguments_of(*flags), ModelFiles.read(CHECKPOINT), engine, messages or [])


@dataclass(frozen=True)
class Turn:
    """What a turn has read and said; ``reused`` tokens of ``prompt`` were in the caches."""

    prompt: list[int]
    reused: int
    answer: list[int]

    @classmethod
    def last(cls, chat: Chat, engine: Engine) -> "Turn":
        """The last turn of a chat."""
        run = engine.last_run
        assert run is not None
        length = run.reused_tokens + run.prefill_tokens
        return cls(chat.token_ids[:length], run.reused_tokens, chat.token_ids[length:])


def fed_straight(engine: Engine, turns: list[Turn]) -> Tensor:
    """Feeds the prompts and answers of ``turns`` in the steps of the chat, leaving out what its
    next turn has not kept; the logits of the last answer, float32 ``[T, V]``.
    """
    engine.reset()
    logits: list[Tensor] = []
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        assert engine.position == turn.reused
        logits = [engine.prefill(turn.prompt[turn.reused :])]
        kept = len(turn.prompt) + len(turn.answer) if following is None else following.reused
        for token in turn.answer[: max(0, kept - len(turn.prompt))]:
            logits.append(engine.decode([token])[0])
        engine.rewind(max(0, len(turn.prompt) - kept))
    return torch.stack(logits)


def assert_exact(engine: Engine, other: Engine, turns: list[Turn]) -> None:
    """The chat of ``engine`` has said, and kept, bit for bit what ``other`` has when it is fed the
    same; a fresh run says the same, or something else where the rounding is larger than the margin.
    """
    last = turns[-1]
    straight = fed_straight(other, turns)
    said = len(last.answer)
    assert straight[:said].argmax(-1).tolist() == last.answer
    # The chat may have read its last token or not.
    for token in (last.prompt + last.answer)[engine.position :]:
        engine.decode([token])
    assert torch.equal(engine.decode([9]), other.decode([9]))
    fresh = other.logits(last.prompt + last.answer)[len(last.prompt) - 1 :]
    for row, (chosen, mine, theirs) in enumerate(zip(last.answer, straight, fresh, strict=False)):
        best = int(theirs.argmax())
        margin = float(theirs[best] - theirs[chosen])
        assert margin <= 2 * float((mine - theirs).abs().max()), row
