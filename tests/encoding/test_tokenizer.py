"""Token ids and streaming text (model.md#tokenizer)."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoding import IncrementalDecoder, Tokenizer


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*map(decoder.push, token_ids), decoder.flush()]


def test_the_test_extra_carries_the_published_tokenizer(tokenizer_file: Path) -> None:
    assert hashlib.sha256(tokenizer_file.read_bytes()).hexdigest().startswith("8f9f37ca")


def test_check_line_of_the_specification(tokenizer: Tokenizer) -> None:
    text = "<｜User｜>你好<｜Assistant｜><think>推理</think>答案<｜end▁of▁sentence｜>"
    ids = [128803, 30594, 128804, 128821, 36101, 128822, 7624, 1]
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_ids_of_the_control_tokens(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 129280)
    assert tokenizer.token_to_id("｜DSML｜") == 128825
    assert tokenizer.token_to_id("<｜read_url｜>") == 128845
    assert tokenizer.token_to_id("<｜nothing｜>") is None


@given(text=st.text(max_size=40))
def test_any_text_survives_a_round_trip(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(pieces(tokenizer, ids)) == text


@pytest.mark.parametrize("text", ["🙂🙃 ﷽", "🧑‍🚀🇨🇭", "é" * 5, "𝔘𝔫𝔦", "丂丄丅"])
def test_characters_split_over_tokens_appear_whole(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    parts = pieces(tokenizer, ids)
    assert len(ids) > 1
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)


def test_some_character_really_is_split_over_tokens(tokenizer: Tokenizer) -> None:
    assert "" in pieces(tokenizer, tokenizer.encode("𝔘𝔫𝔦 ﷽"))[:-1]


@given(ids=st.lists(st.integers(0, 129279), max_size=12))
def test_any_ids_decode_to_the_replacement_of_their_bytes(
    ids: list[int], tokenizer: Tokenizer
) -> None:
    expected = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors="replace")
    assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids)) == expected


def test_an_unfinished_character_is_shown_only_by_flush(tokenizer: Tokenizer) -> None:
    first = next(token for token in range(128000) if tokenizer.token_bytes(token) == b"\xf0")
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.push(first) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.push(tokenizer.encode("a")[0]) == "a"


def test_an_added_token_after_an_unfinished_character_is_whole(tokenizer: Tokenizer) -> None:
    first = next(token for token in range(128000) if tokenizer.token_bytes(token) == b"\xf0")
    assert tokenizer.decode([128822, first]) == "</think>\ufffd"
    assert pieces(tokenizer, [first, 128822]) == ["", "\ufffd</think>", ""]


def test_decoding_work_does_not_grow_with_the_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    token_bytes = tokenizer.token_bytes
    monkeypatch.setattr(
        tokenizer, "token_bytes", lambda token: asked.append(token) or token_bytes(token)
    )
    ids = tokenizer.encode("a bc 你好 " * 50)
    decoder = IncrementalDecoder(tokenizer)
    for token in ids:
        decoder.push(token)
    assert asked == ids


def test_unknown_ids_and_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    for token in (129280, -1, 2**32, 2**40):
        with pytest.raises(ValueError, match=f"token id {token} is not in the vocabulary"):
            tokenizer.decode([token])
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")


def test_the_fewest_tokens_are_never_too_many(tokenizer: Tokenizer) -> None:
    for text in (" " * 1000, "=" * 1000, "你好" * 100, "<｜User｜>" * 50):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))
