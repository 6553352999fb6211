"""A conversation with an engine that keeps its state from turn to turn."""

import argparse
import sys
from contextlib import closing
from itertools import takewhile
from pathlib import Path

from dsv4.cli.answer import answer
from dsv4.cli.arguments import refuse_files_in_use
from dsv4.cli.chat.stop import AnswerStopped, StopRequest
from dsv4.cli.conversation import Conversation, answered
from dsv4.cli.job import Job, ModelFiles, Outcome, make_job
from dsv4.cli.load import bars_are_shown
from dsv4.cli.prompt import check_unicode, encode_conversation
from dsv4.cli.report import answer_of, graph_mode, summary_line, timing
from dsv4.cli.state import write_state
from dsv4.cli.stream import TokenText, make_printer
from dsv4.command.output_file import check_replaced_output
from dsv4.command.progress import TOKENS, ProgressBar, StatusLine
from dsv4.command.streams import say
from dsv4.engine import Engine


class Chat:
    """``messages``: what was said, in the OpenAI format; ``token_ids``: the last prompt and its
    answer. Every prompt is the whole conversation in the chat encoding, of which the engine
    computes what is new.

    A turn that fails, or is stopped before the answer has a word, leaves the chat as it was before.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        files: ModelFiles,
        engine: Engine,
        messages: list[dict],
    ) -> None:
        self.messages = messages
        self._arguments = arguments
        self._files = files
        self._engine = engine
        self.token_ids: list[int] = []
        self._results: list[dict] = []  # of the calls of the last answer, until all are there

    @property
    def open_calls(self) -> list[dict]:
        """Tool calls of the last answer that have no result yet."""
        given = len(self._results)
        for message in reversed(self.messages):
            if message["role"] != "tool":
                return (message.get("tool_calls") or [])[given:]
            given += 1
        return []

    def tell(self, text: str) -> None:
        """A result for the first open call, where there is one, else a question; shows the answer
        when there is nothing open. Raises ``UserError`` and ``FloatingPointError``.
        """
        check_unicode(text, "line")
        calls = self.open_calls
        if not calls:
            self.ask([{"role": "user", "content": text}])
            return
        results = [*self._results, {"role": "tool", "content": text}]
        if len(calls) == 1:
            self.ask(results)
        else:
            self._results = results

    def ask(self, new: list[dict]) -> None:
        """Shows the answer to ``new`` messages behind the others. Raises ``UserError`` and
        ``FloatingPointError``.
        """
        engine = self._engine
        files = self._files
        messages = [*self.messages, *new]
        prompt = encode_conversation(self._arguments, files.tokenizer, engine.max_context, messages)
        job = make_job(self._arguments, files, prompt, engine.max_context)
        outcome = Outcome(engine=engine)
        before = engine.last_run
        try:
            self._show(job, outcome)
        except FloatingPointError:
            self._forget_turn()
            raise
        if not self._arguments.quiet and engine.last_run is not before:
            measured = timing(None, engine.last_run)
            say(summary_line(measured, graph_mode(engine), outcome.finish_reason))
        if outcome.finish_reason == "context":
            say(f"the context of {engine.max_context} tokens is full: /reset begins a new one")
        message = answer_of(job, outcome)[1].message
        is_empty = not message["content"].strip() and not message["tool_calls"]
        if is_empty and outcome.finish_reason != "stop":
            self._forget_turn()
            reason = outcome.finish_reason
            say(f"{reason}: the answer has no word yet, so the question is forgotten")
            return
        self.messages = answered(messages, message)
        self._results = []
        self.token_ids = prompt.token_ids + outcome.token_ids

    def reset(self) -> None:
        """Forgets everything but what the system or a developer said first, tools included."""
        self.messages = list(
            takewhile(lambda one: one["role"] in ("system", "developer"), self.messages)
        )
        self._results = []
        self.token_ids = []
        self._engine.reset()

    def set_system(self, text: str) -> None:
        """Replaces the text of the system message, whose tools stay. The conversation goes on."""
        check_unicode(text, "/system")
        old = self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []
        system = {**(old[0] if old else {"role": "system"}), "content": text}
        self.messages = [system, *self.messages[len(old) :]]

    def save(self, path: Path) -> None:
        """Writes the conversation, results of open calls included, and its state, for ``load`` and
        ``--load-state``. Raises ``UserError``.
        """
        refuse_files_in_use(self._arguments, [("/save", path)])
        check_replaced_output("/save", path)
        tokenizer = self._files.tokenizer
        messages = [*self.messages, *self._results]
        write_state(self._arguments, tokenizer, self._engine, messages, self.token_ids, path)

    def load(self, path: Path) -> None:
        """Goes on with a conversation that was saved, in place of this one. Raises ``UserError``
        with this one as it was.
        """
        before = Conversation.read(path, self._files.config.vocab_size)
        messages = before.chat_messages("/load")
        self._engine.load_state(path)
        self.messages = messages
        self.token_ids = before.token_ids
        self._results = []

    def _show(self, job: Job, outcome: Outcome) -> None:
        """Streams the answer to stdout up to its end, or to Ctrl-C."""
        shown = bars_are_shown(job.arguments)
        text = TokenText(job.tokenizer, job.arguments.stop)
        status = StatusLine(sys.stderr, shown)
        printer = make_printer(sys.stdout, job.prompt.thinking_mode, job.prompt.tools, status)
        try:
            with StopRequest() as stop, ProgressBar("prefill", TOKENS, sys.stderr, shown) as bar:

                def fed(done: int, total: int) -> None:
                    stop.check()
                    bar(done, total)

                with closing(answer(job, self._engine, outcome, text, fed, reuse=True)) as pieces:
                    for piece in pieces:
                        bar.erase()
                        printer.feed(piece)
                        stop.check()
        except AnswerStopped:
            pass
        finally:
            printer.feed(text.finish())
            printer.finish(outcome.complete)

    def _forget_turn(self) -> None:
        """Leaves nothing in the engine that is not of the conversation."""
        # The last of the ids never counts as reusable.
        self._engine.rewind_to(self._engine.reusable_tokens([*self.token_ids, 0]))
