"""Trains the demo's byte-level BPE: the real model's control tokens and pre-tokeniser, except that
a digit is a token.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv4.demo.training import mixture, recall
from dsv4.demo.training.chat import BOS, EOS, PAD

VOCAB_SIZE = 2560
_LETTERS = "[一-龥\u3040-ゟ゠-ヿ]+"
_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The real tokenizer's control tokens in its order (model.md#tokenizer) with their special flag;
# only the ids differ.
CONTROL_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<｜place▁holder▁no▁799｜>", True),
    ("<｜fim▁hole｜>", False),
    ("<｜fim▁begin｜>", False),
    ("<｜fim▁end｜>", False),
    ("<｜User｜>", False),
    ("<｜Assistant｜>", False),
    ("<|EOT|>", False),
    ("<think>", False),
    ("</think>", False),
    ("｜DSML｜", False),
    ("<｜begin▁sys｜>", False),
    ("<｜end▁sys｜>", False),
    ("<｜latest_reminder｜>", False),
    ("<｜action｜>", False),
    ("<｜query｜>", False),
    ("<｜authority｜>", False),
    ("<｜domain｜>", False),
    ("<｜task｜>", False),
    ("<｜political｜>", False),
    ("<｜entity｜>", False),
    ("<｜title｜>", False),
    ("<｜safety｜>", False),
    ("<｜answer｜>", False),
    ("<｜search｜>", False),
    ("<dsml:", False),
    ("</dsml:", False),
    ("<｜search▁begin｜>", False),
    ("<｜search▁end｜>", False),
    ("<｜extracted_url｜>", False),
    ("<｜read_url｜>", False),
    ("<｜end_of_query｜>", True),
)


def train(seed: int, documents: int) -> Tokenizer:
    """A tokenizer trained on ``documents`` generated examples; ids 0, 1, 2 are BOS, EOS, pad,
    control tokens come last.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(_LETTERS), "isolated"),
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS),
        special_tokens=[
            AddedToken(text, special=True, normalized=False) for text in (BOS, EOS, PAD)
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, documents), trainer)
    missing = VOCAB_SIZE - len(CONTROL_TOKENS) - tokenizer.get_vocab_size()
    spare = [(f"<｜place▁holder▁no▁{index}｜>", True) for index in range(missing)]
    for text, special in (*spare, *CONTROL_TOKENS):
        # One call per token keeps the order of the ids.
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
    return tokenizer


def _texts(seed: int, documents: int) -> Iterator[str]:
    rng = random.Random(seed)
    markers = [BOS, EOS, PAD, *(text for text, _ in CONTROL_TOKENS)]
    for index in range(documents):
        example = (
            recall.training_document(rng, 300) if index % 8 == 0 else mixture.short_example(rng)
        )
        text = "".join(example.parts)
        for marker in markers:
            # A line break of its own would teach the tokenizer one; the null never occurs in the
            # texts.
            text = text.replace(marker, "\0")
        yield from (piece for piece in text.split("\0") if piece)


def tokenizer_config() -> dict[str, Any]:
    """``tokenizer_config.json`` with the real file's keys."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "legacy": True,
        "model_max_length": 8192,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
