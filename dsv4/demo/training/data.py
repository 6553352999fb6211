"""Token rows for training and one-example rows for evaluation. Every batch follows from (seed,
index) alone.
"""

import random
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from dsv4.demo.training import mixture, tasks, tools
from dsv4.demo.training.chat import Example

EOS_ID = 1


@dataclass(frozen=True)
class BatchShape:
    """``rows`` rows of ``length`` input tokens; ``recall_share`` of the rows open with a recall
    document. ``sent_share`` of the other documents confirm sent messages, ``near_share`` of those
    without a tool between request and answer; ``words_share`` of the rest repeat random words,
    forwards or backwards, beside those that do so anyway.
    """

    length: int
    rows: int
    recall_share: float
    sent_share: float = 0.0
    near_share: float = 0.0
    words_share: float = 0.0


@dataclass(frozen=True)
class Request:
    """One batch of the stream: it follows from these values alone."""

    tokenizer_json: str
    seed: int
    index: int
    shape: BatchShape


def encode_example(tokenizer: Tokenizer, example: Example) -> tuple[list[int], list[int]]:
    """Token ids and, per token, 1 where it belongs to an answer. Parts are tokenised one by one, as
    at inference.
    """
    ids: list[int] = []
    is_answer: list[int] = []
    for index, encoding in enumerate(
        tokenizer.encode_batch_fast(list(example.parts), add_special_tokens=False)
    ):
        ids += encoding.ids
        is_answer += [index % 2] * len(encoding.ids)
    return ids, is_answer


def training_batch(request: Request) -> np.ndarray:
    """int16 ``[2, rows, length + 1]``: token ids and answer marks. Rows are packed documents, cut
    at the row's end.
    """
    tokenizer = Tokenizer.from_file(request.tokenizer_json)
    shape = request.shape
    batch = np.zeros((2, shape.rows, shape.length + 1), dtype=np.int16)
    for row in range(shape.rows):
        rng = random.Random(f"{request.seed}/{request.index}/{row}")
        batch[:, row] = training_row(tokenizer, rng, shape)
    return batch


def training_row(tokenizer: Tokenizer, rng: random.Random, shape: BatchShape) -> np.ndarray:
    """int16 ``[2, length + 1]``: one packed row."""
    room = shape.length + 1
    ids: list[int] = []
    marks: list[int] = []
    pending = mixture.row_examples(rng, room, shape.recall_share)
    while len(ids) < room:
        if pending:
            example = pending.pop()
        elif shape.sent_share > 0 and rng.random() < shape.sent_share:
            example = tools.sent_messages(rng, near=rng.random() < shape.near_share)
        elif shape.words_share > 0 and rng.random() < shape.words_share:
            example = rng.choice((tasks.copying, tasks.reversing))(rng, False)
        else:
            example = mixture.short_example(rng)
        new_ids, new_marks = encode_example(tokenizer, example)
        ids += new_ids
        marks += new_marks
    return np.array([ids[:room], marks[:room]], dtype=np.int16)


def evaluation_batch(
    tokenizer: Tokenizer, task: str, count: int, length: int, seed: int
) -> np.ndarray:
    """int16 ``[2, count, length + 1]``: one held-out example per row from position 0; only the last
    answer is marked.

    Examples longer than the row are drawn again.
    """
    rng = random.Random(f"evaluation/{seed}/{task}")
    batch = np.zeros((2, count, length + 1), dtype=np.int16)
    batch[0] = EOS_ID
    filled = 0
    while filled < count:
        example = mixture.MEASURED_TASKS[task](rng, True)
        ids, _ = encode_example(tokenizer, example)
        if len(ids) > length:
            continue
        answer = len(tokenizer.encode(example.parts[-1], add_special_tokens=False).ids)
        batch[0, filled, : len(ids)] = ids
        batch[1, filled, len(ids) - answer : len(ids)] = 1
        filled += 1
    return batch
