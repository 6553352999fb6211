"""Key-value recall over long distances: pairs are told, other text follows, then some of them are asked for."""

import random

from dsv4.demo import tasks, words
from dsv4.demo.chat import ASSISTANT, BOS, END_THINK, EOS, USER, Example

OPENING = "Remember these codes."
TOKENS_PER_LINE = 9
"""A pair or a filler line is eight or nine tokens of the demo tokenizer, so lines measure distance well enough."""


def pair_line(key: str, value: str) -> str:
    """The line that tells one pair."""
    return f"The code of {key} is {value}."


def question(key: str) -> str:
    """The question for one pair."""
    return f"What is the code of {key}?"


def answer(value: str) -> str:
    """The answer to a question."""
    return f"It is {value}."


def filler_line(rng: random.Random) -> str:
    """A line that says nothing about codes but uses the same words."""
    subject, verb, thing = rng.choice(words.SUBJECTS), rng.choice(words.VERBS), rng.choice(words.WORDS)
    return f"The {subject} {verb} the {thing} in the {rng.choice(words.PLACES)}."


def document(rng: random.Random, lines: int, span: int, pairs: int, queries: int) -> Example:
    """A text of ``lines`` lines whose first ``span`` lines hold ``pairs`` pairs, then at most ``queries`` questions.

    Every question is a chat turn of its own and asks for another pair.
    """
    keys = rng.sample(words.WORDS, k=pairs)
    values = [rng.choice(words.WORDS) for _ in keys]
    spots = sorted(rng.sample(range(span), k=pairs))
    text = [filler_line(rng) for _ in range(lines)]
    for spot, key, value in zip(spots, keys, values, strict=True):
        text[spot] = pair_line(key, value)
    asked = rng.sample(range(pairs), k=min(queries, pairs))
    parts = []
    for index, pair in enumerate(asked):
        start = f"{BOS}{USER}{OPENING}\n" + "\n".join(text) + "\n" if index == 0 else USER
        parts += [f"{start}{question(keys[pair])}{ASSISTANT}{END_THINK}", answer(values[pair]) + EOS]
    return Example("recall", tuple(parts))


def training_document(rng: random.Random, tokens: int) -> Example:
    """A recall document of about ``tokens`` tokens with as many questions as fit well."""
    queries = rng.randint(1, max(2, min(24, tokens // 50)))
    lines = max(3, (tokens - 10 - 16 * queries) // TOKENS_PER_LINE)

    def candidate() -> tuple[str, Example]:
        pairs = min(lines, rng.randint(min(queries, lines), max(queries, min(32, lines // 2))))
        span = max(pairs, int(lines * rng.choice((0.15, 0.3, 1.0, 1.0))))
        example = document(rng, lines, span, pairs, queries)
        return example.parts[0], example

    return tasks.draw(rng, False, candidate)


def evaluation_document(rng: random.Random, task: str, lines: int, span: int, pairs: int) -> Example:
    """One question about a pair in the first ``span`` of ``lines`` lines; held out by the document's text."""

    def candidate() -> tuple[str, Example]:
        example = document(rng, lines, span, pairs, queries=1)
        return example.parts[0], Example(task, example.parts)

    return tasks.draw(rng, True, candidate)


def recall_128(rng: random.Random, evaluation: bool) -> Example:
    """A pair told more than 128 and up to about 500 tokens ago."""
    lines = rng.randint(26, 56)
    return evaluation_document(rng, "recall_128", lines, lines - 20, rng.randint(2, 6))


def recall_512(rng: random.Random, evaluation: bool) -> Example:
    """A pair told more than 512 and up to about 1,900 tokens ago."""
    lines = rng.randint(84, 210)
    return evaluation_document(rng, "recall_512", lines, lines - 68, rng.randint(4, 16))


def recall_2000(rng: random.Random, evaluation: bool) -> Example:
    """A pair told more than 2,000 tokens ago."""
    return evaluation_document(rng, "recall_2000", 272, 26, rng.randint(4, 24))
