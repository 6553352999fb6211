"""The flags themselves: help with every default, the version, and what reaches the engine."""

import logging

import pytest

import dsv4
import single_shot_inference
from dsv4.checkpoint import tiny_config
from dsv4.cli.arguments import engine_config, parse_arguments
from dsv4.cli.flags import build_parser
from dsv4.cli.job import context_tokens
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.limits import MAX_DRAFTS
from dsv4.plan import DEFAULT_MAX_CONTEXT
from tests.driver.drive import Drive

VALUED = [action for action in build_parser()._actions if action.nargs != 0]


@pytest.mark.parametrize("action", VALUED, ids=lambda action: action.option_strings[0])
def test_help_says_the_default_of_every_flag_with_a_value(action: object) -> None:
    assert "(default: " in str(action.__dict__["help"])


def test_help_shows_an_example_and_the_defaults(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        single_shot_inference.main(["--help"])
    text = " ".join(capfd.readouterr().out.split())
    assert "example: single_shot_inference.py --model" in text
    assert "at most N tokens (default: 512)" in text
    assert "tokens per forward (default: 4096 on one GPU, up to 2048 on several" in text


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        single_shot_inference.main(["--version"])
    assert capfd.readouterr().out == f"dsv4 {dsv4.__version__}\n"


def test_without_flags_the_engine_has_its_own_defaults() -> None:
    assert engine_config(parse_arguments([])) == EngineConfig()


def test_precision_and_the_speculative_module_reach_the_engine() -> None:
    flags = ["--compute-dtype", "float32", "--kv-dtype", "bf16", "--index-dtype", "fp8"]
    flags += ["--prefill-activations", "nvfp4", "--draft", "dspark"]
    flags += ["--draft-tokens", "3", "--draft-weights", "drafts", "--model", "else"]
    assert engine_config(parse_arguments(flags)) == EngineConfig(
        compute_dtype="float32",
        kv_dtype="bf16",
        index_dtype="fp8",
        prefill_activations="nvfp4",
        draft="dspark",
        draft_tokens=3,
        draft_weights="drafts",
    )


@pytest.mark.parametrize("flag", ["--json", "--trace", "--out", "--save-state", "--load-state"])
def test_no_file_has_an_empty_name(flag: str) -> None:
    """As of a shell variable that is not set."""
    with pytest.raises(UserError, match=f"{flag}: found '', expected a path"):
        parse_arguments([flag, ""])


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("7", 7), ("auto", "auto")])
def test_drafts_of_a_step_are_a_number_or_measured(text: str, count: int | str) -> None:
    assert engine_config(parse_arguments(["--draft-tokens", text])).draft_tokens == count


@pytest.mark.parametrize("count", ["0", "8", "-1", "x", "1.0", "", "٣"])
def test_numbers_of_drafts_that_no_step_has_are_refused(count: str) -> None:
    with pytest.raises(UserError, match="expected auto or an integer from 1 to 7"):
        parse_arguments(["--draft-tokens", count])


def test_verbose_shows_log_lines_while_it_runs(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*_: object) -> None:
        logging.getLogger("dsv4").info("about %s", "weights")

    monkeypatch.setattr(single_shot_inference, "generate", said)
    monkeypatch.setattr(single_shot_inference, "report", lambda *_: None)
    assert drive("--verbose").err == "dsv4: about weights\n"
    assert drive().err == ""
    drive("--verbose", "--quiet").assert_user_error("--verbose", "--quiet")


@pytest.mark.parametrize(
    ("wanted", "context"),
    [
        (100, DEFAULT_MAX_CONTEXT),
        (10_000, 10_000 + MAX_DRAFTS),
        (16_380, 16_384),
        (20_000, 16_384),
    ],
)
def test_caches_have_room_for_drafts_behind_the_last_token(wanted: int, context: int) -> None:
    """So the text of a seed does not go with the length of the caches."""
    config = ModelConfig.from_dict(tiny_config(max_position_embeddings=16_384))
    arguments = parse_arguments([])
    assert context_tokens(arguments, config, wanted) == context
    arguments.max_context = 300
    assert context_tokens(arguments, config, wanted) == 300
