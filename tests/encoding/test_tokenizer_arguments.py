"""What a tokenizer refuses to take for text or for token ids."""

from typing import Any

import numpy as np
import pytest

from encoding import Tokenizer


@pytest.mark.parametrize("text", [None, 5, b"text", [{"role": "user", "content": "text"}]])
def test_what_is_no_text_is_named(tokenizer: Tokenizer, text: Any) -> None:
    for call in (tokenizer.encode, tokenizer.fewest_tokens, tokenizer.token_to_id):
        with pytest.raises(ValueError, match=f"is {type(text).__name__}, expected a string"):
            call(text)


@pytest.mark.parametrize("ids", [None, 5])
def test_a_lone_id_is_no_list_of_ids(tokenizer: Tokenizer, ids: Any) -> None:
    expected = f"token_ids is {type(ids).__name__}, expected a list of token ids"
    with pytest.raises(ValueError, match=expected):
        tokenizer.decode(ids)


@pytest.mark.parametrize("token", [None, "text", 1.0, True, [1]])
def test_an_id_that_is_no_integer_is_named(tokenizer: Tokenizer, token: Any) -> None:
    """1.0 and True are found in a dictionary of token 1, the end of sequence."""
    with pytest.raises(ValueError, match=f"is {type(token).__name__}, expected an integer"):
        tokenizer.decode([token])


def test_ids_of_numpy_are_integers(tokenizer: Tokenizer) -> None:
    ids = [1, 5]
    assert tokenizer.decode(np.array(ids, np.int32)) == tokenizer.decode(ids)
