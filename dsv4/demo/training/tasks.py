"""The short tasks of the demo model. Every task draws instances from a seeded ``random.Random``; no
other state.

An instance is named by a text key. ``held_out(key)`` decides by hash, so that training never sees
what the evaluation asks.
"""

import random
import zlib
from collections.abc import Callable

from dsv4.demo.training import words
from dsv4.demo.training.chat import Example, conversation, raw

Task = Callable[[random.Random, bool], Example]
SYSTEMS = ("", "", "", "", "You are a helpful assistant.", "Answer briefly.")
HELD_OUT_SHARE = 8

CAPITAL_QUESTIONS = (
    "What is the capital of {c}?",
    "Which city is the capital of {c}?",
    "Name the capital of {c}.",
    "Tell me the capital of {c}.",
    "What is the capital city of {c}?",
    "Do you know the capital of {c}?",
)
COUNTRY_QUESTIONS = (
    "{p} is the capital of which country?",
    "Which country has the capital {p}?",
    "Name the country whose capital is {p}.",
    "Of which country is {p} the capital?",
)
ADD_QUESTIONS = (
    "What is {a} + {b}?",
    "Compute {a} + {b}.",
    "{a} + {b} =",
    "How much is {a} + {b}?",
)
SUBTRACT_QUESTIONS = tuple(question.replace("+", "-") for question in ADD_QUESTIONS)
TIMES_QUESTIONS = tuple(question.replace("+", "x") for question in ADD_QUESTIONS)
COPY_QUESTIONS = ("Repeat: {w}", "Repeat these words: {w}", "Copy: {w}", "Say this again: {w}")
REVERSE_QUESTIONS = ("Reverse: {w}", "Reverse these words: {w}", "Say this backwards: {w}")


def held_out(key: str) -> bool:
    """Whether an instance belongs to the evaluation: one in ``HELD_OUT_SHARE``, by CRC-32 of its
    key.
    """
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def draw(
    rng: random.Random, evaluation: bool, candidate: Callable[[], tuple[str, Example]]
) -> Example:
    """Draws until the instance's key lies on the wanted side of the split."""
    while True:
        key, example = candidate()
        if held_out(key) == evaluation:
            return example


def capitals(rng: random.Random, evaluation: bool) -> Example:
    """Capital of a country and country of a capital, as chat and as plain text; held out: phrasing
    × fact pairs.
    """

    def candidate() -> tuple[str, Example]:
        country, capital = rng.choice(list(words.CAPITALS.items()))
        forward = f"The capital of {country} is {capital}."
        backward = f"{capital} is the capital of {country}."
        kind = rng.random()
        if kind < 0.5:
            form = rng.choice(CAPITAL_QUESTIONS)
            answer = forward
        elif kind < 0.75:
            form = rng.choice(COUNTRY_QUESTIONS)
            answer = backward
        else:
            return raw_fact(rng, country, capital)
        question = form.format(c=country, p=capital)
        return question, conversation("capitals", [(question, answer)], system=rng.choice(SYSTEMS))

    return draw(rng, evaluation, candidate)


def raw_fact(rng: random.Random, country: str, capital: str) -> tuple[str, Example]:
    """A fact as plain text to be continued; the instance's key and the example."""
    forms = (
        (f"The capital of {country} is", f" {capital}."),
        (f"The capital city of {country} is", f" {capital}."),
        (f"{capital} is the capital of", f" {country}."),
    )
    text, completion = rng.choice(forms)
    return text, raw("capitals", text, completion, bos=rng.random() < 0.6)


def arithmetic_instance(rng: random.Random) -> tuple[str, str, str, int]:
    """Key, question, equation without result, result. The key leaves the phrasing out except for
    the times table.
    """
    kind = rng.random()
    if kind < 0.45:
        a = rng.randint(1, 99)
        b = rng.randint(1, 99)
        return f"{a}+{b}", rng.choice(ADD_QUESTIONS).format(a=a, b=b), f"{a} + {b}", a + b
    if kind < 0.9:
        a, b = sorted((rng.randint(1, 99), rng.randint(1, 99)), reverse=True)
        return f"{a}-{b}", rng.choice(SUBTRACT_QUESTIONS).format(a=a, b=b), f"{a} - {b}", a - b
    a = rng.randint(2, 9)
    b = rng.randint(2, 9)
    question = rng.choice(TIMES_QUESTIONS).format(a=a, b=b)
    return question, question, f"{a} x {b}", a * b


def arithmetic(rng: random.Random, evaluation: bool) -> Example:
    """Two-digit sums and differences (held out: operand pairs) and the times table (held out:
    phrasing × fact).
    """

    def candidate() -> tuple[str, Example]:
        key, question, _, result = arithmetic_instance(rng)
        return key, conversation(
            "arithmetic", [(question, str(result))], system=rng.choice(SYSTEMS)
        )

    return draw(rng, evaluation, candidate)


def counting_instance(rng: random.Random) -> tuple[str, str]:
    """Question and answer of counting up or down between two numbers."""
    length = rng.randint(3, 12)
    low = rng.randint(0, 99 - length)
    numbers = list(range(low, low + length))
    if rng.random() < 0.4:
        numbers.reverse()
    verb = "Count down from" if numbers[0] > numbers[-1] else "Count from"
    return f"{verb} {numbers[0]} to {numbers[-1]}.", ", ".join(map(str, numbers))


def counting(rng: random.Random, evaluation: bool) -> Example:
    """Counting ranges up and down; held out: ranges."""

    def candidate() -> tuple[str, Example]:
        question, answer = counting_instance(rng)
        return question, conversation("counting", [(question, answer)], system=rng.choice(SYSTEMS))

    return draw(rng, evaluation, candidate)


def copying(rng: random.Random, evaluation: bool) -> Example:
    """Repeating two to eight random words; held out: word lists."""

    def candidate() -> tuple[str, Example]:
        text = " ".join(rng.choices(words.WORDS, k=rng.randint(2, 8)))
        turns = [(rng.choice(COPY_QUESTIONS).format(w=text), text)]
        return text, conversation("copying", turns, system=rng.choice(SYSTEMS))

    return draw(rng, evaluation, candidate)


def reversing(rng: random.Random, evaluation: bool) -> Example:
    """Saying two to six random words backwards; held out: word lists."""

    def candidate() -> tuple[str, Example]:
        chosen = rng.choices(words.WORDS, k=rng.randint(2, 6))
        text = " ".join(chosen)
        answer = " ".join(reversed(chosen))
        turns = [(rng.choice(REVERSE_QUESTIONS).format(w=text), answer)]
        return text, conversation("reversing", turns, system=rng.choice(SYSTEMS))

    return draw(rng, evaluation, candidate)


def story_instance(rng: random.Random) -> tuple[str, str]:
    """Question and story; the story follows from the four slots named in the question."""
    name = rng.choice(words.NAMES)
    animal = rng.choice(list(words.STORY_ANIMALS))
    trait = rng.choice(list(words.STORY_TRAITS))
    thing = rng.choice(list(words.STORY_THINGS))
    reaction, moral = words.STORY_TRAITS[trait]
    article = "an" if animal[0] in "aeiou" else "a"
    question = f"Tell me a story about {name}, the {trait} {animal}, and a {thing}."
    story = (
        f"Once upon a time {name}, {article} {animal}, lived {words.STORY_ANIMALS[animal]}. "
        f"One day {name} found a {thing}. {name} {reaction}. {words.STORY_THINGS[thing]} "
        f"So everyone said: {moral} The end."
    )
    return question, story


def stories(rng: random.Random, evaluation: bool) -> Example:
    """Short stories from a grammar; held out: slot combinations."""

    def candidate() -> tuple[str, Example]:
        question, story = story_instance(rng)
        return question, conversation("stories", [(question, story)], system=rng.choice(SYSTEMS))

    return draw(rng, evaluation, candidate)
