"""What a tokenizer.json may hold: what is ignored, what is refused in one line that names it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from encoding import Tokenizer
from encoding.control_tokens import WRITTEN_TOKENS

CONTROL = {token: index for index, token in enumerate(WRITTEN_TOKENS)}
SYMBOLS = sorted(ByteLevel.alphabet())
VOCAB = {token: index for index, token in enumerate([*CONTROL, *SYMBOLS])}
A = VOCAB["a"]
B = VOCAB["b"]
SPACE = VOCAB["Ġ"]
SMALL: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": index,
            "content": content,
            "special": True,
            "normalized": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
        for content, index in CONTROL.items()
    ],
    "normalizer": None,
    "pre_tokenizer": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    },
    "post_processor": None,
    "decoder": {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    },
    "model": {"type": "BPE", "vocab": VOCAB, "merges": []},
}


def write_small(folder: Path, **changes: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps({**SMALL, **changes}), encoding="utf-8")
    return folder


def test_a_folder_stands_for_its_tokenizer_json(tmp_path: Path) -> None:
    small = Tokenizer(write_small(tmp_path))
    assert small.encode("a b") == [A, SPACE, B]
    assert (small.bos_id, small.eos_id, small.vocab_size) == (0, 1, len(VOCAB))


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "<｜end▁of▁sentence｜>",
    }
    assert Tokenizer(write_small(tmp_path, truncation=truncation, padding=padding)).encode(
        "aaaa"
    ) == [A, A, A, A]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"model": {"type": "BPE"}}', "\udcff", "[" * 100_000]
)
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="tokenizer.json: not a usable tokenizer.json") as error:
        Tokenizer(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\ufeff{}", "a byte order mark, expected none"),
        ('{"a": ' + "9" * 5000 + "}", "an integer of 5000 digits, expected at most 4300"),
    ],
)
def test_what_a_library_would_find_is_said_in_words_of_our_own(
    tmp_path: Path, text: str, found: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"not a usable tokenizer.json \(found {found}\)$"):
        Tokenizer(tmp_path)


def test_a_missing_file_and_a_foreign_vocabulary_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tokenizer.json: no such tokenizer file"):
        Tokenizer(tmp_path)
    with pytest.raises(
        ValueError, match="lacks <｜begin▁of▁sentence｜>, not a DeepSeek-V4 tokenizer"
    ):
        Tokenizer(
            write_small(
                tmp_path, added_tokens=[], model={"type": "BPE", "vocab": {"a": 0}, "merges": []}
            )
        )


@pytest.mark.parametrize("token", WRITTEN_TOKENS)
def test_a_control_token_that_is_no_single_token_is_named(tmp_path: Path, token: str) -> None:
    added = [entry for entry in SMALL["added_tokens"] if entry["content"] != token]
    with pytest.raises(ValueError, match=f"{re.escape(token)} becomes .* missing from added_tok"):
        Tokenizer(write_small(tmp_path, added_tokens=added))


def test_an_added_token_that_the_library_numbers_anew_is_named(tmp_path: Path) -> None:
    one = {**SMALL["added_tokens"][0], "content": "<new>", "id": len(VOCAB) + 1}
    expected = (
        f"tokenizer.json: added_tokens: '<new>': found token id {len(VOCAB)}, "
        f"expected the declared {len(VOCAB) + 1}: the vocabulary has another size"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        Tokenizer(write_small(tmp_path, added_tokens=[*SMALL["added_tokens"], one]))


def test_a_vocabulary_that_would_lose_text_is_refused(tmp_path: Path) -> None:
    without_b = {token: index for token, index in VOCAB.items() if token != "b"}
    for vocab, lacks in ((without_b, 1), ({}, 256)):
        model = {**SMALL["model"], "vocab": vocab}
        expected = rf"tokenizer.json: vocab: found no '.', expected .* \(lacks {lacks}\)$"
        with pytest.raises(ValueError, match=expected):
            Tokenizer(write_small(tmp_path, model=model))


@pytest.mark.parametrize(
    ("changes", "found", "expected"),
    [
        ({"pre_tokenizer": None}, "'Whatis3+4?", "'What is 3 + '"),
        ({"pre_tokenizer": {**SMALL["pre_tokenizer"], "add_prefix_space": True}}, "' What i", ""),
        ({"normalizer": {"type": "Lowercase"}}, "'what is '", "'What is '"),
        ({"normalizer": {"type": "Prepend", "prepend": "▁"}}, "'▁What i", "'What is '"),
        ({"normalizer": {"type": "NFC"}}, "", ""),
        ({"normalizer": {"type": "NFKC"}}, "", ""),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": False}}, "", ""),
        ({"normalizer": {"type": "Strip", "strip_left": False, "strip_right": True}}, "", ""),
        ({"added_tokens": [{**token, "rstrip": True} for token in SMALL["added_tokens"]]}, "", ""),
        ({"added_tokens": [{**token, "lstrip": True} for token in SMALL["added_tokens"]]}, "", ""),
    ],
)
def test_a_tokenizer_that_would_change_text_is_refused(
    tmp_path: Path, changes: dict[str, Any], found: str, expected: str
) -> None:
    with pytest.raises(ValueError, match="tokenizer.json: pre_tokenizer, normalizer or") as error:
        Tokenizer(write_small(tmp_path, **changes))
    assert f"change text: found {found}" in str(error.value)
    assert f", expected {expected}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_affixes_are_refused_before_the_library_panics(
    tmp_path: Path, key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    vocab = {**VOCAB, "ab": len(VOCAB)}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], key: "##"}
    with pytest.raises(ValueError, match=f"tokenizer.json.*model: {key}: found '##', expected no"):
        Tokenizer(write_small(tmp_path, model=model))
    assert capfd.readouterr().err == ""


def test_a_panic_of_the_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoding.tokenizer._refuse_affixes", lambda _: None)
    vocab = {**VOCAB, "ab": len(VOCAB)}
    prefix = {"continuing_subword_prefix": "##"}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], **prefix}
    with pytest.raises(ValueError, match="tokenizer.json: not a usable .*slice index") as error:
        Tokenizer(write_small(tmp_path, model=model))
    assert "\n" not in str(error.value)


def test_dropout_of_the_file_is_ignored(tmp_path: Path) -> None:
    vocab = {**VOCAB, "ab": len(VOCAB)}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "dropout": 1.0}
    assert Tokenizer(write_small(tmp_path, model=model)).encode("ab") == [len(VOCAB)]


def test_a_model_that_knows_no_dropout_is_used(tmp_path: Path) -> None:
    model = {"type": "Unigram", "vocab": [[token, -1.0] for token in VOCAB], "unk_id": A}
    assert Tokenizer(write_small(tmp_path, model=model)).encode("a b") == [A, SPACE, B]


def test_added_tokens_and_symbols_of_no_byte_are_text(tmp_path: Path) -> None:
    """é and Ġ would be symbols of bytes within a token of the vocabulary."""
    symbol, added = len(VOCAB), len(VOCAB) + 1
    token = {**SMALL["added_tokens"][0], "content": "<éĠ>", "id": added}
    small = Tokenizer(
        write_small(
            tmp_path,
            model={**SMALL["model"], "vocab": {**VOCAB, "▁": symbol}},
            added_tokens=[*SMALL["added_tokens"], token],
        )
    )
    assert small.encode("a<éĠ>") == [A, added]
    assert small.decode([A, added, symbol]) == "a<éĠ>▁"


def test_the_fewest_tokens_of_a_text_are_found_without_encoding_it(tmp_path: Path) -> None:
    small = Tokenizer(write_small(tmp_path))
    longest = max(len(token.encode()) for token in CONTROL)
    assert small.fewest_tokens("") == 0
    assert small.fewest_tokens("a" * longest) == 1
    assert small.fewest_tokens("a" * longest + "b") == 2
