"""``/v1/completions``: texts and token ids, echoes, the scores that ``lm-eval`` asks for."""

from typing import Any

import pytest
import torch

from dsv4 import SamplingParams
from dsv4.serve.answering import Question
from dsv4.serve.worker import Cancelled
from tests.serve.running import ENDLESS, MODEL, Running, load_demo, running

pytestmark = pytest.mark.slow

TEXT = "The capital of France is"


def ids_of(demo: Running, text: str) -> list[int]:
    return demo.service.files.tokenizer.encode(text)


def complete(demo: Running, prompt: Any, **fields: Any) -> Any:
    return demo.client().completions.create(model=MODEL, prompt=prompt, **fields)


def scored(demo: Running, token_ids: list[int]) -> list[float]:
    """The log-probability of every token but the first, by teacher-forced logits."""
    logprobs_TV = torch.log_softmax(demo.engine.logits(token_ids), -1)
    return [float(logprobs_TV[place, token]) for place, token in enumerate(token_ids[1:])]


def test_what_lm_eval_asks_for_a_loglikelihood(demo: Running) -> None:
    """Its request word for word, and the way it reads the response: every prompt scored, one token
    behind it that is not looked at.
    """
    prompts = [ids_of(demo, TEXT), ids_of(demo, "What is 3 + 4? It is 7.")]
    body = {
        "model": MODEL,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    found = demo.post("/completions", **body).json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    for choice, token_ids in zip(found["choices"], prompts, strict=True):
        noted = choice["logprobs"]
        assert len(noted["tokens"]) == len(token_ids) + 1
        assert noted["token_logprobs"][0] is noted["top_logprobs"][0] is None
        values = noted["token_logprobs"][1:-1]
        assert values == pytest.approx(scored(demo, token_ids), abs=1e-3)
        tops = noted["top_logprobs"][1:-1]
        best = torch.argmax(demo.engine.logits(token_ids), -1)[:-1].tolist()
        greedy = [value == max(top.values()) for value, top in zip(values, tops, strict=True)]
        assert greedy == [a == b for a, b in zip(best, token_ids[1:], strict=True)]
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(map(len, prompts)), 2)


def test_what_lm_eval_asks_for_a_generation(demo: Running) -> None:
    token_ids = ids_of(demo, TEXT)
    produced = list(demo.engine.generate(token_ids, 6, SamplingParams(temperature=0)))
    expected = demo.service.files.tokenizer.decode(produced)
    body = {"prompt": [token_ids], "model": MODEL, "max_tokens": 6, "temperature": 0}
    stops = {"stop": ["<｜end▁of▁sentence｜>", "\n\n"], "seed": 1234}
    found = demo.post("/completions", **body, **stops).json()
    assert [choice["text"] for choice in found["choices"]] == [expected]
    assert found["choices"][0]["logprobs"] is None


def test_an_echo_without_a_continuation_hides_the_token_in_front(demo: Running) -> None:
    """A text gets a beginning-of-sequence token that it does not show: all of its own are scored,
    and their texts, at their offsets, are the text.
    """
    choice = complete(demo, TEXT, echo=True, logprobs=0, max_tokens=0).choices[0]
    noted = choice.logprobs
    assert (choice.text, choice.finish_reason) == (TEXT, "length")
    assert noted.tokens == [choice.text[a:b] for a, b in spans(noted.text_offset, TEXT)]
    bos = demo.service.files.tokenizer.bos_id
    expected = scored(demo, [bos, *ids_of(demo, TEXT)])
    assert noted.token_logprobs == pytest.approx(expected, abs=1e-3)
    assert noted.top_logprobs == [
        {token: value} for token, value in zip(noted.tokens, noted.token_logprobs, strict=True)
    ]


def spans(offsets: list[int], text: str) -> list[tuple[int, int]]:
    return list(zip(offsets, [*offsets[1:], len(text)], strict=True))


def test_echo_and_continuation_are_one_text_streamed_or_not(demo: Running) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 4}
    choice = complete(demo, TEXT, **fields).choices[0]
    chunks = list(complete(demo, TEXT, stream=True, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert choice.text.startswith(TEXT)
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert "".join(tokens) == "".join(choice.logprobs.tokens) == choice.text
    offsets = [at for chunk in chunks for at in chunk.choices[0].logprobs.text_offset]
    assert offsets == choice.logprobs.text_offset
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason == "stop"
    plain = complete(demo, TEXT, max_tokens=4).choices[0]
    assert (TEXT + plain.text, plain.logprobs) == (choice.text, None)


def test_parts_of_characters_have_names_of_their_own(demo: Running) -> None:
    """Two tokens of one character are bytes, and both begin where it does."""
    tokenizer = demo.service.files.tokenizer
    token_ids = [tokenizer.bos_id, *tokenizer.encode("a🜨b")]
    noted = complete(demo, token_ids, echo=True, logprobs=0, max_tokens=0).choices[0].logprobs
    parts = [name for name in noted.tokens if name.startswith("bytes:\\x")]
    assert len(parts) > 1
    data = b"".join(bytes.fromhex(part.removeprefix("bytes:").replace("\\x", "")) for part in parts)
    assert data.decode() == "🜨"
    places = {at for name, at in zip(noted.tokens, noted.text_offset, strict=True) if name in parts}
    assert places == {len("<｜begin▁of▁sentence｜>a")}


def test_several_texts_are_answered_in_their_order(demo: Running) -> None:
    texts = [TEXT, "What is"]
    together = complete(demo, texts, max_tokens=3)
    alone = [complete(demo, text, max_tokens=3).choices[0].text for text in texts]
    assert [choice.text for choice in together.choices] == alone
    by_index: dict[int, str] = {0: "", 1: ""}
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = complete(demo, texts, max_tokens=3, **fields)
    for chunk in chunks:
        by_index[chunk.choices[0].index] += chunk.choices[0].text
    assert list(by_index.values()) == alone
    assert {chunk.usage for chunk in chunks} == {None}
    assert (last.id, last.choices, last.usage) == (chunks[0].id, [], together.usage)


def test_the_default_limit_is_that_of_openai(demo: Running) -> None:
    assert complete(demo, TEXT, extra_body={"ignore_eos": True}).usage.completion_tokens == 16


def test_a_stop_string_ends_the_generation(demo: Running) -> None:
    found = complete(demo, TEXT, stop="Paris", max_tokens=9, extra_body={"ignore_eos": True})
    assert (found.choices[0].text, found.choices[0].finish_reason) == (" ", "stop")
    assert found.usage.completion_tokens == 1


def test_what_was_read_is_counted_for_every_prompt(demo: Running) -> None:
    """A text that says its beginning-of-sequence token gets no other; an echo without
    log-probabilities is not scored.
    """
    tally = demo.service.tally
    count = complete(demo, f"<｜begin▁of▁sentence｜>{TEXT}").usage.prompt_tokens
    before = tally.reused_tokens
    usage = complete(demo, [TEXT, TEXT], echo=True).usage
    reused = usage.prompt_tokens_details.cached_tokens
    assert (usage.prompt_tokens, reused) == (2 * count, 2 * (count - 1))
    assert tally.reused_tokens == before + reused


def test_who_leaves_while_a_prompt_is_scored_ends_it(demo: Running) -> None:
    checks = iter([True])

    def check() -> None:
        if not next(checks, False):
            raise Cancelled

    sampling = SamplingParams(logprobs=0)
    question = Question(ids_of(demo, TEXT), 1, sampling, (), frozenset(), scores_prompt=True)
    with pytest.raises(Cancelled):
        next(demo.service.answering.answer(question, check))


def test_an_answer_that_the_context_ends_has_met_a_limit() -> None:
    with running(load_demo("--max-context", "16")) as small:
        done = small.post("/completions", prompt=[5] * 13, max_tokens=100, **ENDLESS).json()
    assert done["choices"][0]["finish_reason"] == "length"
    assert done["usage"]["completion_tokens"] == 4
