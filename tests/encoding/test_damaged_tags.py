"""Prescribed tags that are not written as prescribed, too long, or come in pieces."""

import pytest

from encoding import StreamingParser
from encoding.dsml_tags import MAX_TAG_CHARACTERS
from tests.encoding.completions import CALL, CLOSE, EOS, OPEN, calls, parse, texts


@pytest.mark.parametrize("quote", ["", "'"])
def test_attributes_without_quotes_or_with_single_ones_are_read(quote: str) -> None:
    completion = parse(f"\n\n{OPEN}{CALL}{CLOSE}{EOS}".replace('"', quote), "chat")
    assert calls(completion) == [("f", {"a": "x"})]
    assert completion.repairs == ("opening_tag_variant",)


def test_the_damage_of_an_opening_tag_alone_is_told() -> None:
    completion = parse(f"\n\n{OPEN.replace('｜', '|')}{CALL}{CLOSE}{EOS}", "chat")
    assert calls(completion) == [("f", {"a": "x"})]
    assert completion.repairs == ("ascii_bars",)


def test_a_slash_behind_the_marker_closes() -> None:
    text = f"\n\n{OPEN}{CALL}{CLOSE}{EOS}".replace("</｜DSML｜", "<｜DSML｜/")
    completion = parse(text, "chat")
    assert calls(completion) == [("f", {"a": "x"})]
    assert completion.repairs == ("closing_tag_variant",)


@pytest.mark.parametrize(
    "rest", ["invoke < 5 is b", f'invoke name="{"f" * MAX_TAG_CHARACTERS}">', "invoker b"]
)
def test_what_cannot_become_a_tag_is_text_without_its_marker(rest: str) -> None:
    for end in (EOS, ""):
        completion = parse(f"a <｜DSML｜{rest}{end}", "chat")
        assert texts(completion) == ("", f"a {rest}")
        assert "stray_control_token" in completion.repairs


@pytest.mark.parametrize("stray", ["</｜DSML｜invoke>\n", "</｜DSML｜parameter>\n", OPEN])
def test_a_stray_tag_between_calls_does_not_end_the_block(stray: str) -> None:
    completion = parse(f"\n\n{OPEN}{CALL}{stray}{CALL}{CLOSE}{EOS}", "chat")
    assert calls(completion) == [("f", {"a": "x"})] * 2
    assert completion.repairs == ("stray_dsml_tag",)


@pytest.mark.parametrize(("half", "repairs"), [("", ()), (CLOSE[:-1], ("half_marker",))])
def test_a_block_that_is_cut_off_between_calls_keeps_them(
    half: str, repairs: tuple[str, ...]
) -> None:
    completion = parse(f"\n\n{OPEN}{CALL}{half}", "chat")
    assert calls(completion) == [("f", {"a": "x"})]
    assert completion.repairs == (*repairs, "unclosed_tool_block", "missing_eos")


def test_a_value_that_nothing_ends_keeps_the_tags_that_it_quotes() -> None:
    value = 'see <invoke name="x"> there'
    begun = CALL[: CALL.index("x</")]
    completion = parse(f"\n\n{OPEN}{begun}{value}{EOS}", "chat")
    assert calls(completion) == [("f", {"a": value})]


@pytest.mark.parametrize("half", ["<｜DS", "<｜end▁of", "</｜DSML｜to", "｜DSM"])
@pytest.mark.parametrize("text", ["a ", "a\n\n"])
def test_half_a_marker_is_left_out_and_told(half: str, text: str) -> None:
    completion = parse(f"{text}{half}", "chat")
    assert (texts(completion), completion.cut_off) == (("", text), half)
    assert completion.repairs == ("half_marker", "missing_eos")


def test_a_tag_behind_much_text_may_come_in_pieces() -> None:
    text = "x" * MAX_TAG_CHARACTERS
    parser = StreamingParser("chat")
    for piece in (f"{text}\n\n{OPEN[:-4]}", f"{OPEN[-4:]}{CALL}{CLOSE}{EOS}"):
        parser.feed(piece)
    parser.finish()
    assert parser.completion == parse(f"{text}\n\n{OPEN}{CALL}{CLOSE}{EOS}", "chat")
    assert parser.completion.repairs == ()


def test_text_behind_a_block_that_nothing_closes_is_not_held_back() -> None:
    parser = StreamingParser("chat")
    parser.feed(f"\n\n{OPEN}{CALL}that")
    assert parser.completion.message["content"] == "that"
    assert calls(parser.completion) == [("f", {"a": "x"})]


def test_calls_stay_text_where_none_are_read() -> None:
    said = f"a\n\n{OPEN}{CALL}{CLOSE} b"
    parser = StreamingParser("chat", reads_calls=False)
    parser.feed(f"{said}{EOS}")
    parser.finish()
    assert (texts(parser.completion), calls(parser.completion)) == (("", said), [])
    assert parser.completion.repairs == ()
