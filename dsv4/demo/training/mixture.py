"""The tasks and their mixture in training."""

import random

from dsv4.demo.training import dialogue, recall, tasks, thinking, tools
from dsv4.demo.training.chat import Example
from dsv4.demo.training.tasks import Task

SHORT_TASKS: dict[str, Task] = {
    "capitals": tasks.capitals,
    "arithmetic": tasks.arithmetic,
    "counting": tasks.counting,
    "copying": tasks.copying,
    "reversing": tasks.reversing,
    "stories": tasks.stories,
    "multi_turn": dialogue.multi_turn,
    "thinking": thinking.thinking,
    "tools": tools.tools,
    "tools_recipient": tools.tools_recipient,
}
RECALL_TASKS: dict[str, Task] = {
    "recall_near": recall.recall_near,
    "recall_128": recall.recall_128,
    "recall_512": recall.recall_512,
    "recall_2000": recall.recall_2000,
}
MEASURED_TASKS = {**SHORT_TASKS, **RECALL_TASKS}

_SHORT_WEIGHTS = {
    "capitals": 14,
    "arithmetic": 24,
    "counting": 8,
    "copying": 8,
    "reversing": 10,
    "stories": 6,
    "multi_turn": 10,
    "thinking": 20,
    "tools": 20,
}
_SMALLTALK_SHARE = 0.04
_SHORT_RECALL_SHARE = 0.35


def short_example(rng: random.Random) -> Example:
    """A training instance of one of the short tasks, smalltalk and short recall included."""
    if rng.random() < _SMALLTALK_SHARE:
        return dialogue.smalltalk(rng, False)
    if rng.random() < _SHORT_RECALL_SHARE:
        return recall.short_document(rng)
    name = rng.choices(list(_SHORT_WEIGHTS), list(_SHORT_WEIGHTS.values()))[0]
    return SHORT_TASKS[name](rng, False)


def row_examples(rng: random.Random, room: int, recall_share: float) -> list[Example]:
    """Examples that start a training row of ``room`` tokens: with ``recall_share`` one recall
    document of any length first.
    """
    if rng.random() >= recall_share:
        return []
    longest = room - 8
    length = longest if rng.random() < 0.4 else int(60 * (longest / 60) ** rng.random())
    return [recall.training_document(rng, length)]
