"""The report: rates, the summary line, and the answer."""

from types import SimpleNamespace
from typing import Any

import pytest

from dsv4.cli.job import Outcome
from dsv4.cli.report import describe_completion, summary_line, timing
from dsv4.demo import CHECKPOINT
from dsv4.encoding import Tokenizer
from dsv4.run_stats import DraftStats, RunStats


def test_rates_follow_from_tokens_and_seconds() -> None:
    measured = timing(1.5, RunStats(100, 2.0, 40, 0.5, "stop"))
    assert measured["prefill_tokens_per_second"] == 50.0
    assert (measured["decode_ms_per_token"], measured["decode_tokens_per_second"]) == (12.5, 80.0)
    assert summary_line(measured, None, "stop") == (
        "load 1.5 s · prefill 100 tokens 50.0 tok/s · "
        "decode 40 tokens 12.5 ms/token 80.0 tok/s · stop"
    )
    with_graph = summary_line(measured, "full", "stop")
    assert with_graph.endswith("12.5 ms/token 80.0 tok/s (cuda graph full) · stop")


def test_a_report_has_the_measured_numbers_and_their_rates() -> None:
    stats = RunStats(100, 2.0, 40, 0.5, "stop", reused_tokens=7)
    measured = timing(None, stats)
    assert measured == {
        "load_seconds": None,
        "reused_tokens": 7,
        "prefill_tokens": 100,
        "prefill_seconds": 2.0,
        "prefill_tokens_per_second": 50.0,
        "decode_tokens": 40,
        "decode_seconds": 0.5,
        "decode_ms_per_token": 12.5,
        "decode_tokens_per_second": 80.0,
        "drafts": None,
    }
    assert summary_line(measured, "split", "stop") == (
        "prefill 100 tokens 50.0 tok/s behind 7 reused · "
        "decode 40 tokens 12.5 ms/token 80.0 tok/s (cuda graph split) · stop"
    )


@pytest.mark.parametrize("stats", [None, RunStats(0, 0.0, 0, 0.0, "length")])
def test_what_was_not_measured_has_no_rate(stats: RunStats | None) -> None:
    measured = timing(0.0, stats)
    assert measured["decode_ms_per_token"] is None
    assert (
        summary_line(measured, None, "interrupted")
        == "load 0.0 s · prefill 0 tokens · decode 0 tokens · interrupted"
    )


def test_drafts_are_summed_up_by_position() -> None:
    drafts = DraftStats(20, 40, (20, 18), (15, 6), 0.002, 0.03)
    measured = timing(0.0, RunStats(10, 1.0, 40, 0.5, "stop", drafts=drafts))
    assert measured["drafts"] == {
        "steps": 20,
        "tokens_per_step": 2.0,
        "drafted": [20, 18],
        "accepted": [15, 6],
        "acceptance": [0.75, pytest.approx(1 / 3)],
        "draft_us_per_step": pytest.approx(100),
        "verify_us_per_step": pytest.approx(1500),
    }
    assert summary_line(measured, None, "stop").endswith(
        "80.0 tok/s · drafts 2.00 tokens a step, accepted 75/33 %, draft 100 µs, verify 1500 µs"
        " · stop"
    )


def test_a_run_without_a_step_has_no_drafts_to_report() -> None:
    measured = timing(0.0, RunStats(10, 1.0, 0, 0.0, "stop", drafts=DraftStats(0, 0, (), (), 0, 0)))
    assert measured["drafts"] is None


@pytest.mark.parametrize(
    ("finish_reason", "stop_string", "complete"),
    [("stop", None, True), ("stop", "x", False), ("length", None, False)],
)
def test_an_answer_is_complete_when_the_model_has_ended_it(
    finish_reason: str, stop_string: str | None, complete: bool
) -> None:
    outcome = Outcome(finish_reason=finish_reason, stop_string=stop_string)
    assert outcome.complete == complete


@pytest.mark.parametrize("call", ["", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f'])
def test_a_call_that_is_cut_off_is_reported_as_it_was_written(call: str) -> None:
    tokenizer = Tokenizer(CHECKPOINT)
    text = f"I look.\n\n{call}" if call else "I look."
    token_ids = tokenizer.encode(text)
    job: Any = SimpleNamespace(
        prompt=SimpleNamespace(thinking_mode="chat", tools=None),
        eos_token_ids=frozenset((tokenizer.eos_id,)),
        tokenizer=tokenizer,
        arguments=SimpleNamespace(stop=()),
    )
    outcome = Outcome(token_ids=token_ids, finish_reason="length" if call else "stop")
    found = describe_completion(job, outcome)
    assert (found["text"], found["token_ids"], found["logprobs"]) == (text, token_ids, None)
    assert (found["message"]["content"], found["message"]["tool_calls"]) == ("I look.", [])
    assert found["cut_off"] == (call or None)
    assert ("missing_eos" in found["repairs"]) == bool(call)
