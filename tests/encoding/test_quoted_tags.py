"""Text and arguments that quote tool-call tags (model.md#parsing)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoding import Completion, encode_messages, parse_message_from_completion_text
from tests.encoding.completions import CALL, CLOSE, EOS, OPEN, calls, parse, texts
from tests.encoding.test_strict_parser import messages_with

# Every damaged writing of a tag; the prescribed marker itself is a token that text cannot hold.
MARKERS = ("|DSML|", "｜DSML|", "|DSML｜", "")
QUOTED = [
    tag.replace("MARK", marker)
    for marker in MARKERS
    for tag in (
        "<MARKtool_calls>",
        "</MARKtool_calls>",
        '<MARKinvoke name="rm">',
        '<MARKtool_calls>\n<MARKinvoke name="rm">',
        '<MARKparameter name="p" string="true">',
        "</MARKparameter>",
        "<MARK/parameter>",
        "</MARKinvoke>",
    )
]
DAMAGED = f"{OPEN}{CALL}{CLOSE}".replace("｜DSML｜", "|DSML|")
ARGUMENT = st.lists(st.sampled_from([*QUOTED, "a", "<", ">", '"', "'", "\n", " "])).map("".join)
# Inline: no line begins with a tag.
TEXT = st.lists(
    st.sampled_from([f"x{tag}" for tag in QUOTED] + ["a", "<b", ">", '"', "'", "\nx"])
).map("".join)


@given(content=TEXT, reasoning=TEXT, argument=ARGUMENT, mode=st.sampled_from(["chat", "thinking"]))
def test_quoted_tags_are_read_as_the_strict_parser_reads_them(
    content: str, reasoning: str, argument: str, mode: str
) -> None:
    messages = messages_with(content, reasoning, [("f", {"p": argument, "q": [argument]})])
    text = encode_messages(messages[1:], mode, context=messages[:1])
    assert parse(text, mode) == Completion(parse_message_from_completion_text(text, mode), (), True)


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_tag_is_text(quoted: str) -> None:
    text = f"The tag {quoted} is one."
    assert texts(parse(f"{text}</think>{text}{EOS}")) == (text, text)
    argument = CALL.replace(">x<", f">{text}<")
    completion = parse(f"\n\n{OPEN}{argument}{CLOSE}{EOS}", "chat")
    assert (calls(completion), completion.repairs) == ([("f", {"a": text})], ())


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("close", ["</MARKparameter>\n", ""])
def test_a_value_that_no_prescribed_tag_ends_still_ends_with_a_damaged_one(
    marker: str, close: str
) -> None:
    start = CALL[: CALL.index("</｜DSML｜parameter")]
    end = f"{close or '</|DSML|parameter>'}</MARKinvoke>\n</MARKtool_calls>".replace("MARK", marker)
    completion = parse(f"\n\n{OPEN}{start}{end}{EOS}", "chat")
    assert calls(completion) == [("f", {"a": "x"})]
    assert texts(completion) == ("", "")


@pytest.mark.parametrize("before", ["", "c\n", "c\n\n", "<think>r</think>"])
def test_a_damaged_block_is_read_where_a_line_begins(before: str) -> None:
    assert calls(parse(f"{before}{DAMAGED}{EOS}", "chat")) == [("f", {"a": "x"})]
    twice = parse(f"{before}{DAMAGED}\n\n{DAMAGED}{EOS}", "chat")
    assert calls(twice) == [("f", {"a": "x"})] * 2


@pytest.mark.parametrize(
    "text",
    [
        f"like {DAMAGED}",
        DAMAGED.replace(' name="f"', ""),
        DAMAGED.replace("<|DSML|tool_calls>", ""),
        DAMAGED.replace("<|DSML|tool_calls>", "</|DSML|tool_calls>"),
        "<|DSML|tool_calls>\nis the tag",
    ],
)
def test_other_damaged_tags_are_text(text: str) -> None:
    completion = parse(f"{text}{EOS}", "chat")
    assert (texts(completion), calls(completion)) == (("", text), [])


def test_damaged_tags_call_only_tools_that_there_are() -> None:
    for tools in ([], [{"function": {"name": "g"}}]):
        completion = parse(f"{DAMAGED}{EOS}", "chat", tools)
        assert (texts(completion), calls(completion)) == (("", DAMAGED), [])
    assert calls(parse(f"{DAMAGED}{EOS}", "chat", [{"function": {"name": "f"}}]))


def test_half_a_damaged_opening_is_text_where_there_is_no_tool() -> None:
    for half in ("<tool_calls>", DAMAGED[: DAMAGED.index("f")]):
        assert texts(parse(f"c\n\n{half}", "chat", [])) == ("", f"c\n\n{half}")


def test_half_a_damaged_opening_is_left_out() -> None:
    for length in range(len("<|DSML|"), DAMAGED.index(">\n<|DSML|parameter")):
        completion = parse(f"c\n\n{DAMAGED[:length]}", "chat")
        assert completion.cut_off == DAMAGED[:length].strip()
        assert "half_marker" in completion.repairs
