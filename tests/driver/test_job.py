"""What is decided before any weight is read: the folder, and how much the caches hold."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4.cli.arguments import parse_arguments
from dsv4.cli.job import ModelFiles, check_model_folder, make_job, prepare
from dsv4.cli.prompt import PromptTooLong
from dsv4.demo import CHECKPOINT
from dsv4.errors import UserError
from dsv4.limits import MAX_DRAFTS

RAW = ["--prompt", "one two three", "--raw"]


@pytest.mark.parametrize("loaded", [None, 100, 20_000])
def test_the_caches_hold_the_answer_behind_the_prompt_and_what_is_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, loaded: int | None
) -> None:
    """What is loaded may be longer than the prompt that goes on behind its beginning."""
    prompt: Any = SimpleNamespace(token_ids=[5] * 7)
    before = SimpleNamespace(saved=SimpleNamespace(position=loaded))
    monkeypatch.setattr("dsv4.cli.job.build_prompt", lambda *_: prompt)
    monkeypatch.setattr("dsv4.cli.job.Conversation.read", lambda *_: before)
    arguments = parse_arguments(["--model", str(checkpoint), *RAW, "--max-tokens", "9000"])
    arguments.load_state = None if loaded is None else Path("state")
    job = prepare(arguments)
    assert job.engine_config.max_context == max(7 + 9000, loaded or 0) + MAX_DRAFTS


def test_a_prompt_may_fill_the_caches_and_no_more() -> None:
    files = ModelFiles.read(CHECKPOINT)
    arguments = parse_arguments(["--model", str(CHECKPOINT), *RAW])
    prompt: Any = SimpleNamespace(token_ids=[5] * 7)
    assert make_job(arguments, files, prompt, 7).engine_config.max_context == 7
    with pytest.raises(PromptTooLong, match="found a prompt of 7 tokens, expected at most 6$"):
        make_job(arguments, files, prompt, 6)


@pytest.mark.parametrize("folder", ["none", "/none/none", "none/no/none", "no ne/none"])
def test_only_what_may_be_a_name_of_the_hub_is_to_be_fetched_from_there(folder: str) -> None:
    with pytest.raises(UserError, match=": no such folder$"):
        check_model_folder(Path(folder))
    with pytest.raises(UserError, match=r"hf download none/V4-x\.1 --local-dir V4-x\.1, then"):
        check_model_folder(Path("none/V4-x.1"))
