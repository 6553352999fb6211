"""The tool task: call the right tool with the right arguments in DSML, answer from a result, or
answer directly.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsv4.demo.training import dialogue, tasks, words
from dsv4.demo.training.chat import (
    END_THINK,
    Example,
    conversation,
    tool_call,
    tool_result,
    tools_system,
)


@dataclass(frozen=True)
class Use:
    """One use of a tool: what the user asks, the arguments, a result and the final answer."""

    question: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str


def function(name: str, description: str, **properties: str) -> dict[str, Any]:
    """An OpenAI function object whose parameters are all required."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"name": name, "description": description, "parameters": schema}


def weather(rng: random.Random) -> Use:
    """Use of get_weather."""
    city = rng.choice(list(words.CAPITALS.values()))
    sky = rng.choice(words.WEATHER)
    degrees = rng.randint(1, 39)
    question = rng.choice(
        ("How is the weather in {}?", "What is the weather in {} today?", "Weather in {}?")
    ).format(city)
    result = {"temperature": degrees, "sky": sky}
    return Use(question, {"city": city}, result, f"It is {sky} in {city} with {degrees} degrees.")


def time(rng: random.Random) -> Use:
    """Use of get_time."""
    city = rng.choice(list(words.CAPITALS.values()))
    hour = rng.randint(10, 23)
    minute = rng.randint(10, 59)
    question = rng.choice(("What time is it in {}?", "Tell me the time in {}.")).format(city)
    return Use(
        question, {"city": city}, {"time": f"{hour}:{minute}"}, f"It is {hour}:{minute} in {city}."
    )


def multiply(rng: random.Random) -> Use:
    """Use of multiply: the one tool with numbers as arguments."""
    a = rng.randint(11, 99)
    b = rng.randint(11, 99)
    question = rng.choice(("Multiply {} by {}.", "What is {} times {}?")).format(a, b)
    return Use(question, {"a": a, "b": b}, {"product": a * b}, f"{a} times {b} is {a * b}.")


def message(rng: random.Random) -> Use:
    """Use of send_message."""
    name = rng.choice(words.NAMES)
    text = " ".join(rng.choices(words.WORDS, k=rng.randint(1, 4)))
    question = rng.choice(("Send {} the message: {}", "Write to {}: {}")).format(name, text)
    return Use(
        question, {"to": name, "text": text}, {"sent": True}, f"I sent your message to {name}."
    )


def alarm(rng: random.Random) -> Use:
    """Use of set_alarm: numbers and a boolean."""
    hour = rng.randint(10, 23)
    minute = rng.randint(10, 59)
    repeat = rng.random() < 0.5
    question = f"Set an alarm for {hour}:{minute}{' every day' if repeat else ''}."
    arguments = {"hour": hour, "minute": minute, "daily": repeat}
    return Use(question, arguments, {"set": True}, f"The alarm is set for {hour}:{minute}.")


def search(rng: random.Random) -> Use:
    """Use of search."""
    query = " ".join(rng.choices(words.WORDS, k=rng.randint(1, 3)))
    hits = rng.randint(10, 99)
    question = rng.choice(("Search for {}.", "Look up {}.")).format(query)
    return Use(question, {"query": query}, {"hits": hits}, f"I found {hits} pages about {query}.")


TOOLS: tuple[tuple[dict[str, Any], Callable[[random.Random], Use]], ...] = (
    (function("get_weather", "Get the weather of a city.", city="string"), weather),
    (function("get_time", "Get the local time of a city.", city="string"), time),
    (function("multiply", "Multiply two numbers.", a="integer", b="integer"), multiply),
    (function("send_message", "Send a message to a person.", to="string", text="string"), message),
    (
        function("set_alarm", "Set an alarm.", hour="integer", minute="integer", daily="boolean"),
        alarm,
    ),
    (function("search", "Search the web.", query="string"), search),
)


def tools(rng: random.Random, evaluation: bool) -> Example:
    """One to three tools offered; call one, answer from its result, or answer a question that needs
    none.
    """
    while True:
        key, example, _ = tool_instance(rng)
        if tasks.held_out(key) == evaluation:
            return example


def tools_recipient(rng: random.Random, evaluation: bool) -> Example:
    """The part of ``tools`` that confirms a sent message: the result says only "sent", the name
    stands in the call.

    Measured on its own, without a bar, because nearly all failures of ``tools`` are this case.
    """
    while True:
        key, example, names_recipient = tool_instance(rng)
        if names_recipient and tasks.held_out(key) == evaluation:
            return example


def tool_instance(rng: random.Random) -> tuple[str, Example, bool]:
    """Key, conversation, and whether its last answer confirms a sent message."""
    offered = rng.sample(TOOLS, k=rng.randint(1, 3))
    system = tools_system([schema for schema, _ in offered], rng.choice(tasks.SYSTEMS))
    schema, make = rng.choice(offered)
    use = make(rng)
    name = schema["name"]
    thinking = rng.random() < 0.3
    kind = rng.random()
    reason = f"I need the tool {name}."
    if kind < 0.12:
        turn = dialogue.arithmetic_turn if rng.random() < 0.5 else dialogue.capitals_turn
        turns = [turn(rng)]
        reason = "No tool is needed."
    elif kind < 0.65:
        turns = [(use.question, tool_call(name, use.arguments))]
    else:
        turns = [
            (use.question, tool_call(name, use.arguments)),
            (tool_result(json.dumps(use.result)), use.answer),
        ]
    reasons = [reason, "The tool has answered."][: len(turns)]
    example = with_reasons("tools", turns, reasons, thinking, system)
    return repr(turns[0]), example, len(turns) == 2 and name == "send_message"


def sent_messages(rng: random.Random, near: bool) -> Example:
    """One to four messages sent one after the other, so that the answer has to name the last
    recipient. ``near``: answered at once, without a call. Trained, not measured.
    """
    offered = [schema for schema, make in TOOLS if make is message or rng.random() < 0.3]
    rng.shuffle(offered)
    # Without the tools, a training row holds three times as many recipients.
    bare = near or rng.random() < 0.5
    content = rng.choice(tasks.SYSTEMS)
    system = content if bare else tools_system(offered, content)
    turns: list[tuple[str, str]] = []
    reasons: list[str] = []
    for _ in range(rng.randint(1, 4)):
        use = unseen_message(rng)
        if near:
            turns.append((use.question, use.answer))
            reasons.append("No tool is needed.")
        else:
            turns.append((use.question, tool_call("send_message", use.arguments)))
            turns.append((tool_result(json.dumps(use.result)), use.answer))
            reasons += ["I need the tool send_message.", "The tool has answered."]
    return with_reasons("tools", turns, reasons, not near and rng.random() < 0.3, system)


def unseen_message(rng: random.Random) -> Use:
    """A message that the evaluation does not ask to send."""
    while True:
        use = message(rng)
        if not tasks.held_out(repr((use.question, tool_call("send_message", use.arguments)))):
            return use


def with_reasons(
    task: str, turns: list[tuple[str, str]], reasons: list[str], thinking: bool, system: str
) -> Example:
    """A conversation in which, in thinking mode, every assistant turn opens with a reason (tools
    keep old reasoning).
    """
    if not thinking:
        return conversation(task, turns, system=system)
    said = [
        (question, why + END_THINK + answer)
        for (question, answer), why in zip(turns, reasons, strict=True)
    ]
    parts = [
        part
        for turn in said
        for part in conversation(task, [turn], thinking=True, system=system).parts
    ]
    # Only the first turn opens the document: the others lose the beginning-of-sentence token and
    # the system text.
    opening = parts[0][: parts[0].index("<｜User｜>")]
    return Example(
        task,
        tuple(
            part.removeprefix(opening) if i and i % 2 == 0 else part for i, part in enumerate(parts)
        ),
    )
