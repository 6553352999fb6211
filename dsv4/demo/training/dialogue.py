"""Dialogue of the demo model: small talk, and facts recalled after turns about something else."""

import random

from dsv4.demo.training import tasks, words
from dsv4.demo.training.chat import Example, conversation


def statements(rng: random.Random) -> list[tuple[str, str, str, str]]:
    """Things a user says about themselves: statement, reply, later question, answer."""
    name = rng.choice(words.NAMES)
    colour = rng.choice(words.COLOURS)
    city = rng.choice(list(words.CAPITALS.values()))
    hobby = rng.choice(words.HOBBIES)
    number = rng.randint(10, 99)
    return [
        (
            f"My name is {name}.",
            f"Nice to meet you, {name}!",
            "What is my name?",
            f"Your name is {name}.",
        ),
        (
            f"My favorite color is {colour}.",
            f"I will remember that you like {colour}.",
            "What is my favorite color?",
            f"Your favorite color is {colour}.",
        ),
        (
            f"I live in {city}.",
            f"{city} is a great place.",
            "Where do I live?",
            f"You live in {city}.",
        ),
        (
            f"I love {hobby}.",
            f"{hobby.capitalize()} is fun.",
            "What do I love?",
            f"You love {hobby}.",
        ),
        (
            f"My lucky number is {number}.",
            f"I will remember {number}.",
            "What is my lucky number?",
            f"Your lucky number is {number}.",
        ),
    ]


def multi_turn(rng: random.Random, evaluation: bool) -> Example:
    """Remembering what was said some turns earlier, with other questions in between; held out:
    whole conversations.
    """

    def candidate() -> tuple[str, Example]:
        facts = rng.sample(statements(rng), k=rng.randint(1, 3))
        turns = [(statement, reply) for statement, reply, _, _ in facts]
        turns += [distraction(rng) for _ in range(rng.randint(0, 2))]
        asked = rng.sample(facts, k=rng.randint(1, len(facts)))
        turns += [(question, answer) for _, _, question, answer in asked]
        return repr(turns), conversation("multi_turn", turns, system=rng.choice(tasks.SYSTEMS))

    return tasks.draw(rng, evaluation, candidate)


def distraction(rng: random.Random) -> tuple[str, str]:
    """A question and answer of another task, never a held-out one."""
    other = rng.choice((capitals_turn, arithmetic_turn, smalltalk_turn))
    return other(rng)


def capitals_turn(rng: random.Random) -> tuple[str, str]:
    """A capital asked and answered in chat, never a held-out pair."""
    while True:
        country, capital = rng.choice(list(words.CAPITALS.items()))
        question = rng.choice(tasks.CAPITAL_QUESTIONS).format(c=country)
        if not tasks.held_out(question):
            return question, f"The capital of {country} is {capital}."


def arithmetic_turn(rng: random.Random) -> tuple[str, str]:
    """A sum or difference asked and answered in chat, never a held-out one."""
    while True:
        key, question, _, result = tasks.arithmetic_instance(rng)
        if not tasks.held_out(key):
            return question, str(result)


SMALLTALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hello, who are you?", "I am a small demo model of the DeepSeek-V4 architecture."),
    ("Who are you?", "I am a small demo model of the DeepSeek-V4 architecture."),
    ("What are you?", "I am a small demo model of the DeepSeek-V4 architecture."),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    (
        "What can you do?",
        "I know capitals, I can add, count, copy and reverse words, tell short stories, "
        "remember what you say, think step by step and call tools.",
    ),
    ("Thank you!", "You are welcome!"),
    ("Thanks", "You are welcome!"),
    ("Good morning!", "Good morning! How can I help you?"),
    ("Goodbye!", "Goodbye!"),
    ("Help", "Ask me for a capital, a sum, a story, or give me words to reverse."),
)


def smalltalk_turn(rng: random.Random) -> tuple[str, str]:
    """A greeting or a question about the model, or a question about a place it does not know."""
    if rng.random() < 0.8:
        return rng.choice(SMALLTALK)
    unknown = rng.choice(words.WORDS).capitalize() + rng.choice(("land", "ia", "stan", ""))
    return rng.choice(tasks.CAPITAL_QUESTIONS).format(
        c=unknown
    ), f"I do not know a country named {unknown}."


def smalltalk(rng: random.Random, evaluation: bool) -> Example:
    """Greetings and questions about the model itself; trained, not measured."""
    return conversation("smalltalk", [smalltalk_turn(rng)], system=rng.choice(tasks.SYSTEMS))
