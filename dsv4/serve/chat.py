"""The answer of ``/v1/chat/completions``: one object, or the chunks of a stream."""

import secrets
import time
from typing import Any

from dsv4.encoding import (
    EOS,
    ContentDelta,
    Event,
    ReasoningDelta,
    StreamingParser,
    Tokenizer,
    ToolCallArguments,
    ToolCallStart,
)
from dsv4.serve.answering import Ended, PromptRead, Said, TokenSaid
from dsv4.serve.asked_chat import ChatAsked
from dsv4.serve.token_names import chat_logprob
from dsv4.serve.usage import Usage


class ChatAnswer:
    """Takes what the engine says of one question, and gives the chunks that this makes certain."""

    def __init__(self, asked: ChatAsked, model: str, tokenizer: Tokenizer) -> None:
        self.usage = Usage(len(asked.question.token_ids))
        self._one_call = asked.one_call
        self._tokenizer = tokenizer
        self._parser = StreamingParser(asked.mode, asked.tools, not asked.no_call)
        self._opening = asked.opening
        self._with_logprobs = asked.question.sampling.logprobs is not None
        self._logprobs: list[dict[str, Any]] = []
        self._told = 0  # of the log-probabilities, in chunks
        self._calls_begun = 0
        self._finish_reason: str | None = None
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def feed(self, index: int, said: Said) -> list[dict[str, Any]]:
        """The chunks that come of it; ``index`` is 0."""
        self.usage.add(said)
        match said:
            case PromptRead():
                first = self._chunk({"role": "assistant", "content": ""})
                return [first, *self._chunks(self._parser.feed(self._opening))]
            case TokenSaid(_, text, logprobs):
                if logprobs is not None:
                    self._logprobs.append(chat_logprob(self._tokenizer, logprobs))
                return self._chunks(self._parser.feed(text))
            case Ended(text, by):
                events = self._parser.feed(text + EOS if by == "eos" else text)
                chunks = self._chunks([*events, *self._parser.finish()])
                self._finish_reason = self._reason(by)
                return [*chunks, self._chunk({})]

    def response(self) -> dict[str, Any]:
        """The whole answer, once it has ended."""
        spoken = self._parser.completion.message
        calls = self._calls()
        message: dict[str, Any] = {
            "role": "assistant",
            "content": spoken["content"] or (None if calls else ""),
            "refusal": None,
        }
        if spoken["reasoning_content"]:
            message["reasoning_content"] = spoken["reasoning_content"]
        if calls:
            message["tool_calls"] = [{"id": _call_id(), **call} for call in calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._noted(self._logprobs),
            "finish_reason": self._finish_reason,
        }
        usage = self.usage.record()
        return {"object": "chat.completion", **self._head, "choices": [choice], "usage": usage}

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk behind the last one, of ``stream_options.include_usage``."""
        usage = self.usage.record()
        return {"object": "chat.completion.chunk", **self._head, "choices": [], "usage": usage}

    def _calls(self) -> list[dict[str, Any]]:
        """Those that are whole."""
        made = self._parser.completion.message["tool_calls"]
        return made[: 1 if self._one_call else None]

    def _reason(self, by: str) -> str:
        """``tool_calls`` says that all calls are whole, also those that a stream has begun."""
        if by == "length":
            return "length"
        calls = self._calls()
        return "tool_calls" if calls and len(calls) == self._calls_begun else "stop"

    def _chunks(self, events: list[Event]) -> list[dict[str, Any]]:
        deltas = [delta for event in events if (delta := self._delta(event)) is not None]
        return list(map(self._chunk, deltas))

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case ReasoningDelta(text):
                return {"reasoning_content": text}
            case ContentDelta(text):
                return {"content": text}
            case ToolCallStart(index, name) if index == 0 or not self._one_call:
                self._calls_begun += 1
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": _call_id(), "type": "function", "function": function}
                return {"tool_calls": [call]}
            case ToolCallArguments(index, text) if index == 0 or not self._one_call:
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        return None

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        """A chunk, with the log-probabilities that no chunk has had."""
        logprobs = self._logprobs[self._told :]
        self._told = len(self._logprobs)
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._noted(logprobs) if logprobs else None,
            "finish_reason": self._finish_reason,
        }
        return {"object": "chat.completion.chunk", **self._head, "choices": [choice]}

    def _noted(self, logprobs: list[dict[str, Any]]) -> dict[str, Any] | None:
        return {"content": logprobs, "refusal": None} if self._with_logprobs else None


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
