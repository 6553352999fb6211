"""What the small files of a model's folder say together."""

import dataclasses

import pytest

from dsv4.cli.job import ModelFiles
from dsv4.demo import CHECKPOINT
from dsv4.json_object import JsonReader


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ((7,), {}, {7}),
        ((7,), {"eos_token_id": [8, 9]}, {8, 9}),
        ((), {}, {1}),
        ((7,), {"eos_token_id": []}, {1}),
    ],
)
def test_an_answer_ends_where_the_tokenizer_says_unless_another_file_does(
    config: tuple[int, ...], generation: dict[str, object], expected: set[int]
) -> None:
    files = ModelFiles.read(CHECKPOINT)
    assert files.tokenizer.eos_id == 1
    stated = dataclasses.replace(
        files,
        config=dataclasses.replace(files.config, eos_token_ids=config),
        generation=JsonReader(generation, "generation_config.json"),
    )
    assert stated.eos_token_ids == expected
