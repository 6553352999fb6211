"""What the engine says as the texts and tokens of completions: tokens that are no text."""

from types import SimpleNamespace
from typing import Any

from dsv4 import SamplingParams
from dsv4.demo import CHECKPOINT
from dsv4.encoding import Tokenizer
from dsv4.logprobs import TokenLogprobs
from dsv4.serve.answering import Answering, Ended, PromptRead, Question, TokenSaid
from dsv4.serve.asked import EchoedPrompt
from dsv4.serve.completion import CompletionAnswer
from dsv4.serve.fields import CompletionFields
from dsv4.serve.token_names import chat_logprob

TOKENIZER = Tokenizer(CHECKPOINT)
PART = TOKENIZER.encode("🜨")[0]
NO_TEXT = 10**6


def noted(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, ())


def streamed(said: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """The choices of a stream of these tokens and their texts."""
    question = Question([1], 9, SamplingParams(logprobs=0), (), frozenset())
    fields = CompletionFields(prompt="a", logprobs=0)
    answer = CompletionAnswer(fields, [question], [EchoedPrompt("a", [1])], "m", TOKENIZER)
    chunks = [answer.feed(0, TokenSaid(one, text, noted(one))) for one, text in said]
    return [chunk["choices"][0] for made in chunks for chunk in made]


def test_a_token_without_text_is_told_at_once() -> None:
    [choice] = streamed([(PART, "")])
    assert choice["text"] == ""
    assert [name[:7] for name in choice["logprobs"]["tokens"]] == ["bytes:\\"]


def test_a_token_that_the_tokenizer_lacks_is_one_character_behind_what_was_held_back() -> None:
    [other] = TOKENIZER.encode("a")
    choices = streamed([(PART, ""), (NO_TEXT, "\ufffd\ufffd"), (other, "a")])
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0], [1], [2]]
    assert choices[1]["logprobs"]["tokens"] == [f"token_id:{NO_TEXT}"]


def test_a_token_begins_with_the_character_that_it_completes_or_behind_one_that_none_does() -> None:
    [other] = TOKENIZER.encode("a")
    parts = TOKENIZER.encode("🜨")
    said = [(one, "") for one in parts[:-1]] + [(parts[-1], "🜨"), (PART, ""), (other, "\ufffda")]
    places = [choice["logprobs"]["text_offset"] for choice in streamed([*said, (other, "a")])]
    assert places == [[0]] * len(parts) + [[1], [2], [3]]


def test_an_answer_completes_no_character_of_the_prompt() -> None:
    *begun, last = TOKENIZER.encode("🜨")
    question = Question(begun, 9, SamplingParams(logprobs=0), (), frozenset())
    fields = CompletionFields(prompt=begun, logprobs=0, echo=True)
    answer = CompletionAnswer(fields, [question], [EchoedPrompt("\ufffd", begun)], "m", TOKENIZER)
    answer.feed(0, PromptRead(0))
    answer.feed(0, TokenSaid(last, "\ufffd", noted(last)))
    [choice] = answer.response()["choices"]
    assert choice["text"] == "\ufffd\ufffd"
    assert choice["logprobs"]["text_offset"] == [*[0] * len(begun), 1]


def test_a_part_of_a_character_has_its_bytes_in_a_chat() -> None:
    entry = chat_logprob(TOKENIZER, noted(PART))
    assert (entry["token"], bytes(entry["bytes"])) == ("\ufffd", TOKENIZER.token_bytes(PART))


def test_a_token_that_the_tokenizer_lacks_has_no_bytes_in_a_chat() -> None:
    found = TokenLogprobs(NO_TEXT, -1.0, ((NO_TEXT + 1, -0.5),))
    first, other = (
        {"token": f"token_id:{token_id}", "bytes": [], "logprob": logprob}
        for token_id, logprob in ((NO_TEXT, -1.0), (NO_TEXT + 1, -0.5))
    )
    assert chat_logprob(TOKENIZER, found) == {**first, "top_logprobs": [other]}


def test_half_a_character_at_the_limit_may_be_the_stop_string() -> None:
    ids = TOKENIZER.encode("a🜨")[:-1]
    sequences: Any = SimpleNamespace(resume=lambda *_: None)
    engine: Any = SimpleNamespace(
        reusable_tokens=lambda ids: 0,
        generate=lambda *_, **__: (token for token in ids),
        last_run=SimpleNamespace(finish_reason="length"),
    )
    question = Question([1], len(ids), SamplingParams(), ("\ufffd",), frozenset())
    *_, end = Answering(engine, TOKENIZER, sequences).answer(question, lambda: None)
    assert end == Ended("", "stop")
