"""The thinking task: a short visible reasoning, then the answer."""

import random

from dsv4.demo.training import dialogue, tasks, words
from dsv4.demo.training.chat import END_THINK, Example, conversation

Turn = tuple[str, str, str, str]


def sum_of_three(rng: random.Random) -> Turn:
    """Key, question, reasoning and answer of a sum or difference of three numbers."""
    a = rng.randint(10, 50)
    b = rng.randint(2, 49)
    c = rng.randint(2, 40)
    minus = rng.random() < 0.5
    sign, total = ("-", a + b - c) if minus else ("+", a + b + c)
    if total < 0:
        return sum_of_three(rng)
    question = rng.choice(("What is {} + {} {} {}?", "Compute {} + {} {} {}.")).format(
        a, b, sign, c
    )
    return (
        f"{a}+{b}{sign}{c}",
        question,
        f"{a} + {b} = {a + b}. {a + b} {sign} {c} = {total}.",
        str(total),
    )


def word_problem(rng: random.Random) -> Turn:
    """Key, question, reasoning and answer of a small word problem."""
    name = rng.choice(words.NAMES)
    thing = rng.choice(("apple", "coin", "book", "stone", "card", "shell"))
    a = rng.randint(5, 50)
    b = rng.randint(2, 40)
    c = rng.randint(2, min(40, a + b))
    question = (
        f"{name} has {a} {thing}s, finds {b} more and gives {c} away. How many {thing}s are left?"
    )
    reason = f"{a} + {b} = {a + b}. {a + b} - {c} = {a + b - c}."
    return f"{a}+{b}-{c}", question, reason, f"{name} has {a + b - c} {thing}s left."


def two_numbers(rng: random.Random) -> Turn:
    """Key, question, reasoning and answer: a two-digit sum or difference, or the times table."""
    key, question, equation, result = tasks.arithmetic_instance(rng)
    return key, question, f"{equation} = {result}.", str(result)


def capital(rng: random.Random) -> Turn:
    """Key, question, reasoning and answer of a capital."""
    country, city = rng.choice(list(words.CAPITALS.items()))
    question = rng.choice(tasks.CAPITAL_QUESTIONS).format(c=country)
    return (
        question,
        question,
        f"The country is {country}. Its capital is {city}.",
        f"The capital of {country} is {city}.",
    )


def reverse(rng: random.Random) -> Turn:
    """Key, question, reasoning and answer of a word list said backwards."""
    chosen = rng.choices(words.WORDS, k=rng.randint(2, 6))
    question = rng.choice(tasks.REVERSE_QUESTIONS).format(w=" ".join(chosen))
    reason = f"There are {len(chosen)} words and the last one is {chosen[-1]}."
    return " ".join(chosen), question, reason, " ".join(reversed(chosen))


def count(rng: random.Random) -> Turn:
    """Key, question, reasoning and answer of a counting range."""
    question, answer = tasks.counting_instance(rng)
    numbers = answer.split(", ")
    return question, question, f"I start at {numbers[0]} and stop at {numbers[-1]}.", answer


def plain(rng: random.Random) -> Turn:
    """Key, question, reasoning and answer of smalltalk, copying and stories: nothing to reason
    about.
    """
    kind = rng.random()
    if kind < 0.4:
        question, answer = dialogue.smalltalk_turn(rng)
        return "easy" + question, question, "This is an easy question.", answer
    if kind < 0.7:
        question, answer = tasks.story_instance(rng)
        return question, question, "The user wants a story.", answer
    text = " ".join(rng.choices(words.WORDS, k=rng.randint(2, 8)))
    return text, rng.choice(tasks.COPY_QUESTIONS).format(w=text), "I repeat the words.", text


def thinking(rng: random.Random, evaluation: bool) -> Example:
    """Reasoning before the answer; held out: operands, word lists and phrasing × fact pairs."""
    kinds = (sum_of_three, word_problem, two_numbers, capital, reverse, count)
    weights = (6, 4, 3, 2, 2, 1)

    def candidate() -> tuple[str, Example]:
        kind = plain if not evaluation and rng.random() < 0.15 else rng.choices(kinds, weights)[0]
        key, question, reason, answer = kind(rng)
        turn = (question, reason + END_THINK + answer)
        # Smalltalk is never measured, so none of it may fall on the evaluation's side.
        key = "easy" if key.startswith("easy") else key
        return key, conversation(
            "thinking", [turn], thinking=True, system=rng.choice(tasks.SYSTEMS)
        )

    return tasks.draw(rng, evaluation, candidate)
