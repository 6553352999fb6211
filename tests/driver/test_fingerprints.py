"""Which flags make the answer to a line of ``--prompts`` another one."""

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


def test_a_prompt_that_no_context_holds_has_no_tokens() -> None:
    text = b'{"prompt": "a b c d e f g h i j", "max_tokens": 9}'
    assert line_of(text, "--max-context", 4).tokens == 0
    assert line_of(text).tokens > 9
