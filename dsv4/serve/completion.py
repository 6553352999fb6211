"""The answer of ``/v1/completions``: one object, or the chunks of a stream."""

import secrets
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

from dsv4.encoding import IncrementalDecoder, Tokenizer
from dsv4.logprobs import TokenLogprobs
from dsv4.serve.answering import Ended, PromptRead, Question, Said, TokenSaid
from dsv4.serve.asked import EchoedPrompt
from dsv4.serve.fields import CompletionFields
from dsv4.serve.token_names import token_name
from dsv4.serve.usage import Usage

# A token, its log-probability and its likely alternatives (None at the start of a sequence), and
# where it begins in the text.
_Entry = tuple[str, float | None, dict[str, float] | None, int]


class _Choice:
    """The answer to one prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: EchoedPrompt | None, noted: bool) -> None:
        """``prompt`` None: it is not echoed. ``noted``: with log-probabilities."""
        self.text = ""
        self.entries: list[_Entry] = []
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer)
        self._prompt = prompt
        self._noted = noted
        self._offset = 0

    def add(self, said: Said) -> str:
        """The text that it adds."""
        match said:
            case PromptRead(_, logprobs):
                text = self._echo(logprobs)
            case TokenSaid(token_id, text, logprobs):
                if self._noted:
                    self._note(token_id, logprobs)
            case Ended(text, by):
                self.finish_reason = "length" if by == "length" else "stop"
        self.text += text
        return text

    def record(self, text: str, entries: Sequence[_Entry], index: int) -> dict[str, Any]:
        """The object of ``choices``, for a part of the text and the tokens of that part."""
        logprobs = None
        if self._noted:
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            columns = zip(*entries, strict=True) if entries else ((), (), (), ())
            logprobs = {name: list(one) for name, one in zip(names, columns, strict=True)}
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
        }

    def _echo(self, logprobs: Sequence[TokenLogprobs]) -> str:
        if self._prompt is None:
            return ""
        ids = self._prompt.token_ids
        if self._noted:
            # The first token of a sequence is given, not chosen.
            chosen = chain([None] * (len(ids) - len(logprobs)), logprobs)
            for token_id, one in zip(ids, chosen, strict=True):
                self._note(token_id, one)
            # The answer does not complete a character of the prompt.
            self._offset += len(self._decoder.flush())
        return self._prompt.text

    def _note(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        name = token_name(self._tokenizer, token_id)
        value = None
        top = None
        if logprobs is not None:
            value = logprobs.logprob
            top = {token_name(self._tokenizer, other): number for other, number in logprobs.top}
            top.setdefault(name, value)
        self.entries.append((name, value, top, self._place(token_id)))

    def _place(self, token_id: int) -> int:
        """Where the next token begins in the text: with the character that it completes, or behind
        what shows that none was completed.
        """
        try:
            text = self._decoder.push(token_id)
            own = IncrementalDecoder(self._tokenizer).push(token_id)
        except ValueError:  # An id without text is shown as one character.
            own = "\ufffd"
            text = self._decoder.flush() + own
        place = self._offset + max(0, len(text) - len(own))
        self._offset += len(text)
        return place


class CompletionAnswer:
    """Takes what the engine says of every prompt, and gives the chunks that this makes certain."""

    def __init__(
        self,
        fields: CompletionFields,
        questions: Sequence[Question],
        prompts: Sequence[EchoedPrompt],
        model: str,
        tokenizer: Tokenizer,
    ) -> None:
        self.usage = Usage(sum(len(question.token_ids) for question in questions))
        noted = fields.logprobs is not None
        shown = prompts if fields.echo else [None] * len(prompts)
        self._choices = [_Choice(tokenizer, prompt, noted) for prompt in shown]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def feed(self, index: int, said: Said) -> list[dict[str, Any]]:
        """The chunks that come of it, for the prompt with this index."""
        self.usage.add(said)
        choice = self._choices[index]
        before = len(choice.entries)
        text = choice.add(said)
        entries = choice.entries[before:]
        if not text and not entries and not isinstance(said, Ended):
            return []
        return [{**self._head, "choices": [choice.record(text, entries, index)]}]

    def response(self) -> dict[str, Any]:
        """The whole answer, once it has ended."""
        choices = [
            choice.record(choice.text, choice.entries, index)
            for index, choice in enumerate(self._choices)
        ]
        return {**self._head, "choices": choices, "usage": self.usage.record()}

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk behind the last one, of ``stream_options.include_usage``."""
        return {**self._head, "choices": [], "usage": self.usage.record()}
