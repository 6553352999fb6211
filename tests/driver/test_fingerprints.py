"""Which flags make the answer to a line of ``--prompts`` another one."""

from pathlib import Path

import pytest

from dsv4.cli.arguments import parse_arguments
from dsv4.cli.flags import build_parser
from dsv4.cli.job import ModelFiles
from dsv4.cli.prompts.prompts_file import PromptLine, read_line
from dsv4.demo import CHECKPOINT
from dsv4.limits import MAX_DRAFTS


def line_of(text: bytes, *flags: object) -> PromptLine:
    """The line as a run with these flags reads it."""
    words = ["--prompts", "lines", "--out", "answers", *map(str, flags)]
    files = ModelFiles.read(CHECKPOINT)
    return read_line(1, text, build_parser(), parse_arguments(words), files)


def test_the_context_counts_where_a_seed_has_no_room_for_all_drafts() -> None:
    text = b'{"prompt": "a", "seed": 1, "temperature": 1, "max_tokens": 9}'
    roomy = line_of(text)
    room = roomy.tokens + MAX_DRAFTS
    assert line_of(text, "--max-context", room).request == roomy.request
    assert line_of(text, "--max-context", room - 1).request != roomy.request
    assert line_of(text, "--max-context", room - 1).request != (
        line_of(text, "--max-context", room - 2).request
    )


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (b'{"prompt": "a", "temperature": 0, "max_tokens": 9}', ()),
        (b'{"prompt": "a", "temperature": 1, "max_tokens": 9}', ()),
        (b'{"prompt": "a", "seed": 1, "temperature": 1, "max_tokens": 9}', ("--draft", "off")),
    ],
)
def test_the_context_does_not_count_for_other_answers(text: bytes, flags: tuple[str, ...]) -> None:
    roomy = line_of(text, *flags)
    assert line_of(text, *flags, "--max-context", roomy.tokens).request == roomy.request


def test_everything_that_decides_about_an_answer_counts(tmp_path: Path) -> None:
    text = b'{"prompt": "a", "seed": 1, "temperature": 1, "max_tokens": 9}'
    other_lines = [
        text.replace(b'"a"', b'"b"'),
        text.replace(b"9", b"8"),
        *(text.replace(b'"prompt": "a"', messages_of(content)) for content in (b"a", b"b")),
    ]
    other_flags = [
        ("--kv-dtype", "bf16"),
        ("--compute-dtype", "float32"),
        ("--draft", "off"),
        ("--model", tmp_path),
    ]
    lines = [text, *other_lines]
    found = [line_of(one) for one in lines] + [line_of(text, *flags) for flags in other_flags]
    assert len({line.request for line in found}) == len(lines) + len(other_flags)


def messages_of(content: bytes) -> bytes:
    return b'"messages": [{"role": "user", "content": "%s"}]' % content


def test_a_model_has_one_name_wherever_it_is_linked_to(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(CHECKPOINT)
    text = b'{"prompt": "a"}'
    assert line_of(text, "--model", link).request == line_of(text).request


@pytest.mark.parametrize("words", [b"a b c d", b"word " * 100])
def test_a_line_has_the_tokens_of_prompt_and_answer_or_none_where_no_context_holds_it(
    words: bytes,
) -> None:
    text = b'{"prompt": "%s", "max_tokens": 9}' % words
    whole = line_of(text).tokens
    prompt = whole - 9
    assert line_of(text, "--max-context", prompt).tokens == whole
    assert line_of(text, "--max-context", prompt - 1).tokens == 0
    assert line_of(text, "--max-context", 1).tokens == 0
    assert line_of(text.replace(b"9", b"10")).tokens == whole + 1
