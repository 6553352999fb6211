"""Key-value recall over long distances: pairs are told, other text follows, then some of them are
asked for.
"""

import random

from dsv4.demo.training import tasks, words
from dsv4.demo.training.chat import ASSISTANT, BOS, END_THINK, EOS, USER, Example

OPENING = "Remember these codes."
TOKENS_PER_LINE = 9
TOKENS_PER_QUESTION = 17


def pair_line(key: str, value: str) -> str:
    """The line that tells one pair."""
    return f"Please note that one code is {key}:{value}."


def answer(key: str, value: str) -> str:
    """The answer to a question: it says the key again, right before the value."""
    return f"The code is {key}:{value}."


def question(key: str) -> str:
    """The question for one pair."""
    return f"What is the code of {key}?"


def filler_line(rng: random.Random) -> str:
    """A line that says nothing about codes."""
    subject = rng.choice(words.SUBJECTS)
    verb = rng.choice(words.VERBS)
    thing = rng.choice(words.FILLERS)
    return f"The {subject} {verb} the {thing} in the {rng.choice(words.PLACES)}."


def document(rng: random.Random, lines: int, span: int, pairs: int, queries: int) -> Example:
    """A text of ``lines`` lines whose first ``span`` lines hold ``pairs`` pairs, then at most
    ``queries`` questions.

    Every question is a chat turn of its own and asks for another pair.
    """
    keys = rng.sample(words.KEYS, k=pairs)
    values = [rng.choice(words.VALUES) for _ in keys]
    spots = sorted(rng.sample(range(span), k=pairs))
    text = [filler_line(rng) for _ in range(lines)]
    for spot, key, value in zip(spots, keys, values, strict=True):
        text[spot] = pair_line(key, value)
    asked = rng.sample(range(pairs), k=min(queries, pairs))
    parts = []
    for index, pair in enumerate(asked):
        start = f"{BOS}{USER}{OPENING}\n" + "\n".join(text) + "\n" if index == 0 else USER
        parts += [
            f"{start}{question(keys[pair])}{ASSISTANT}{END_THINK}",
            answer(keys[pair], values[pair]) + EOS,
        ]
    return Example("recall", tuple(parts))


def training_document(rng: random.Random, tokens: int) -> Example:
    """A recall document of about ``tokens`` tokens with up to 24 questions."""
    queries = rng.randint(1, max(2, min(24, tokens // 50)))
    pairs = rng.randint(max(2, queries), max(queries, min(32, tokens // 30)) + 1)
    lines = max(pairs, (tokens - 10 - TOKENS_PER_QUESTION * queries) // TOKENS_PER_LINE)

    def candidate() -> tuple[str, Example]:
        span = max(pairs, int(lines * rng.choice((0.15, 0.3, 1.0, 1.0))))
        example = document(rng, lines, span, pairs, queries)
        return example.parts[0], example

    return tasks.draw(rng, False, candidate)


def short_document(rng: random.Random) -> Example:
    """A recall document of few lines: where matching a key to its value is learned first."""
    return training_document(rng, int(40 * 2 ** rng.uniform(0, 3)))


def evaluation_document(
    rng: random.Random, task: str, fillers: tuple[int, int], most_pairs: int
) -> Example:
    """One question about a pair that at least ``fillers[0]`` filler lines follow; held out by the
    document's text.

    Up to ``fillers[1]`` filler lines, and the pairs stand between the first ones.
    """

    def candidate() -> tuple[str, Example]:
        lines = rng.randint(*fillers)
        pairs = rng.randint(2, most_pairs)
        span = pairs + lines - fillers[0]
        example = document(rng, lines + pairs, span, pairs, queries=1)
        return example.parts[0], Example(task, example.parts)

    return tasks.draw(rng, True, candidate)


def recall_near(rng: random.Random, evaluation: bool) -> Example:
    """A pair told inside the sliding window."""
    return evaluation_document(rng, "recall_near", (0, 4), 5)


def recall_128(rng: random.Random, evaluation: bool) -> Example:
    """A pair told more than 128 and up to about 500 tokens ago."""
    return evaluation_document(rng, "recall_128", (16, 52), 8)


def recall_512(rng: random.Random, evaluation: bool) -> Example:
    """A pair told more than 512 and up to about 1,900 tokens ago."""
    return evaluation_document(rng, "recall_512", (60, 205), 16)


def recall_2000(rng: random.Random, evaluation: bool) -> Example:
    """A pair told more than 2,000 tokens ago."""
    return evaluation_document(rng, "recall_2000", (230, 260), 24)


def needle(rng: random.Random, tokens: int, depth: float, pairs: int) -> Example:
    """A question about the pair told at ``depth`` (0: first line, 1: last line) of a text of about
    ``tokens`` tokens, with ``pairs`` − 1 others anywhere in it.
    """
    lines = max(pairs, (tokens - 10 - TOKENS_PER_QUESTION) // TOKENS_PER_LINE)
    asked = round(depth * (lines - 1))
    keys = rng.sample(words.KEYS, k=pairs)
    values = [rng.choice(words.VALUES) for _ in keys]
    others = rng.sample([line for line in range(lines) if line != asked], k=pairs - 1)
    text = [filler_line(rng) for _ in range(lines)]
    for spot, key, value in zip((asked, *others), keys, values, strict=True):
        text[spot] = pair_line(key, value)
    told = f"{BOS}{USER}{OPENING}\n" + "\n".join(text)
    prompt = f"{told}\n{question(keys[0])}{ASSISTANT}{END_THINK}"
    return Example("needle", (prompt, answer(keys[0], values[0]) + EOS))
