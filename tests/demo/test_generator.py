"""The generator: deterministic, split by instance, in the model's own chat encoding, at the
distances it promises.
"""

import json
import random
import re

import pytest

from dsv4.demo import CHECKPOINT
from dsv4.demo.training import mixture, recall, tasks, tools, words
from dsv4.demo.training.chat import BOS, EOS, TOOLS_TEXT, USER, Example, conversation, tool_call
from encoding import Tokenizer, encode_messages

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(CHECKPOINT)


def examples(task: str, evaluation: bool, count: int = 300) -> list[Example]:
    rng = random.Random(task)
    return [mixture.MEASURED_TASKS[task](rng, evaluation) for _ in range(count)]


@pytest.mark.parametrize("task", mixture.MEASURED_TASKS)
def test_the_same_seed_gives_the_same_examples(task: str) -> None:
    assert examples(task, True, 5) == examples(task, True, 5)


@pytest.mark.parametrize("task", mixture.SHORT_TASKS)
def test_no_held_out_question_is_trained(task: str) -> None:
    """The whole last exchange counts: the text before it may differ in system text and earlier
    turns only.
    """
    name = "tools" if task == "tools_recipient" else task
    trained = {example.parts for example in examples(name, False, 2000)}
    assert not trained & {example.parts for example in examples(task, True)}


def test_held_out_sums_are_never_trained_in_any_phrasing() -> None:
    def operands(example: Example) -> set[str]:
        return set(re.findall(r"\d+ [+-] \d+", example.prompt))

    trained = set().union(*map(operands, examples("arithmetic", False, 3000)))
    assert not trained & set().union(*map(operands, examples("arithmetic", True)))


@pytest.mark.parametrize(
    ("task", "shortest"), [("recall_128", 128), ("recall_512", 512), ("recall_2000", 2000)]
)
def test_recall_keeps_its_distance(task: str, shortest: int, tokenizer: Tokenizer) -> None:
    for example in examples(task, True, 10):
        pair = example.answer.removeprefix("The code is ")
        after = example.prompt.index(pair) + len(pair)
        assert len(tokenizer.encode(example.prompt[after:])) > shortest


def test_recall_words_play_one_part_each() -> None:
    assert not set(words.KEYS) & set(words.VALUES) | set(words.KEYS) & set(words.FILLERS)


def test_recall_asks_for_a_pair_that_was_told() -> None:
    for example in [recall.short_document(random.Random(seed)) for seed in range(20)]:
        told = set(re.findall(r"one code is (\w+:\w+)\.", example.parts[0]))
        assert {answer.split()[3].removesuffix("." + EOS) for answer in example.parts[1::2]} <= told


def test_chat_equals_the_encoder() -> None:
    turns = [
        ("My name is Ivy.", "Nice to meet you, Ivy!"),
        ("What is my name?", "Your name is Ivy."),
    ]
    messages = [{"role": "system", "content": "Answer briefly."}]
    for question, answer in turns:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    found = conversation("multi_turn", turns, system="Answer briefly.")
    assert "".join(found.parts) == encode_messages(messages, "chat")
    assert found.prompt == encode_messages(messages[:-1], "chat")
    found = conversation("thinking", [("What is 1 + 2?", "")], thinking=True)
    assert found.prompt == encode_messages(
        [{"role": "user", "content": "What is 1 + 2?"}], "thinking"
    )


@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_tools_equal_the_encoder(mode: str) -> None:
    use = tools.alarm(random.Random(3))
    schema = tools.TOOLS[4][0]
    call = {"name": "set_alarm", "arguments": json.dumps(use.arguments)}
    messages = [
        {
            "role": "system",
            "content": "Answer briefly.",
            "tools": [{"type": "function", "function": schema}],
        },
        {"role": "user", "content": use.question},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I need the tool set_alarm.",
            "tool_calls": [{"id": "1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "1", "content": json.dumps(use.result)},
    ]
    turns = [
        (use.question, tool_call("set_alarm", use.arguments)),
        (f"<tool_result>{json.dumps(use.result)}</tool_result>", use.answer),
    ]
    system = tools.tools_system([schema], "Answer briefly.")
    reasons = ["I need the tool set_alarm.", "The tool has answered."]
    found = tools.with_reasons("tools", turns, reasons, mode == "thinking", system)
    assert found.prompt == encode_messages(messages, mode)
    assert TOOLS_TEXT.partition("{schemas}")[0] in found.prompt


@pytest.mark.parametrize("near", [True, False])
def test_sent_messages_are_confirmed_to_their_recipients(near: bool) -> None:
    def requests(text: str) -> list[str]:
        return re.findall(rf"{USER}((?:Send|Write to) .*?)<｜Assistant｜>", text)

    held_out = {requests(e.prompt)[0] for e in examples("tools_recipient", True, 500)}
    for seed in range(100):
        parts = tools.sent_messages(random.Random(seed), near).parts
        text = "".join(parts)
        asked = re.findall(r"(?:Send|Write to) (\w+?)(?: the message)?: ", text)
        assert asked == re.findall(r"I sent your message to (\w+)\.", text)
        assert not held_out & set(requests(text))


def test_stories_follow_from_their_question() -> None:
    found: dict[str, str] = {}
    for example in examples("stories", False, 2000):
        question = example.prompt.partition(USER)[2]
        assert found.setdefault(question, example.answer) == example.answer


def test_the_split_takes_one_in_eight() -> None:
    share = sum(tasks.held_out(str(number)) for number in range(8000)) / 8000
    assert 0.11 < share < 0.14
    assert BOS not in conversation("x", [("a", "b")]).parts[1]
