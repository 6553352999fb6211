"""Replies as JSON that every client can read."""

import json
import math

import pytest

from dsv4.serve.reply import json_response


def test_no_reply_has_numbers_that_json_does_not_have() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_response({"logprob": math.nan})


def test_a_reply_is_unicode_whatever_the_folder_of_the_model_is_called() -> None:
    assert json.loads(bytes(json_response({"model": "a\udcff"}).body)) == {"model": "a\udcff"}


def test_a_reply_is_one_line_also_where_lines_are_split_as_python_does() -> None:
    """As clients do that read a stream with httpx."""
    content = {"text": "a\x85b\u2028c\u2029d\x0be\x1cf\r\n"}
    line = bytes(json_response(content).body).decode()
    assert line.splitlines() == [line]
    assert json.loads(line) == content
