"""The results of a run: a summary line, a profile's table, a JSON file."""

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dsv4.cli.draft_report import draft_record, draft_summary
from dsv4.cli.job import Job, Outcome
from dsv4.cli.stream import parse_answer, text_of
from dsv4.command.output_file import write_output
from dsv4.command.streams import say, show, silence_stdout
from dsv4.encoding import Completion, Tokenizer
from dsv4.engine import Engine
from dsv4.measure.provenance import provenance
from dsv4.parallel.devices import table_name
from dsv4.plan import MemoryPlan
from dsv4.run_stats import RunStats

_NOTHING_RAN = RunStats(0, 0.0, 0, 0.0, "interrupted")


def report(job: Job, outcome: Outcome) -> None:
    """The summary line and the profile's table on stderr, unless ``--quiet`` or an error follows,
    and the ``--json`` file.
    """
    measured = timing(outcome.load_seconds, outcome.stats)
    if not job.arguments.quiet and outcome.finish_reason != "error":
        if outcome.profile is not None:
            say(outcome.profile.table())
        say(summary_line(measured, graph_mode(outcome.engine), outcome.finish_reason))
    if job.arguments.json is not None:
        write_report(job.arguments.json, describe(job, outcome, measured))


def report_plan(job: Job, plan: MemoryPlan) -> None:
    """The plan as a table on stdout, and in the ``--json`` file."""
    try:
        show(f"{plan}\n")
    except BrokenPipeError:
        silence_stdout()
    if job.arguments.json is not None:
        devices = [
            {**asdict(device), "device": str(device.device), "fits": device.fits}
            for device in plan.devices
        ]
        record = {
            "plan": {
                "max_context": plan.max_context,
                "fits": plan.fits,
                "devices": devices,
                "pinned_host_bytes": plan.staging_bytes,
            },
            "config": config_record(job, None),
            "provenance": provenance(shlex.join(sys.argv)),
        }
        write_report(job.arguments.json, record)


def write_report(path: Path, record: dict[str, Any]) -> None:
    """Writes the ``--json`` file, one line."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    write_output("--json", path, f"{text}\n")


def describe(job: Job, outcome: Outcome, measured: dict[str, Any]) -> dict[str, Any]:
    """The content of the ``--json`` file."""
    engine = outcome.engine
    return {
        "prompt": describe_prompt(job),
        "completion": describe_completion(job, outcome),
        "finish_reason": outcome.finish_reason,
        "stop_string": outcome.stop_string,
        "timing": measured,
        "cuda_graph": graph_mode(engine),
        "profile": None if outcome.profile is None else outcome.profile.record(),
        "config": config_record(job, engine),
        "devices": [] if engine is None else device_names(engine),
        "ops": None if engine is None else ops_name(engine),
        "provenance": provenance(shlex.join(sys.argv)),
    }


def describe_prompt(job: Job) -> dict[str, Any]:
    """What the model was given."""
    return {"text": job.prompt.text, "token_ids": job.prompt.token_ids}


def describe_completion(job: Job, outcome: Outcome) -> dict[str, Any]:
    """What the model has answered, as text, as a message and as tokens."""
    text, answer = answer_of(job, outcome)
    return {
        "text": text,
        "message": answer.message,
        "cut_off": answer.cut_off or None,
        "repairs": list(answer.repairs),
        "token_ids": outcome.token_ids,
        "logprobs": describe_logprobs(job.tokenizer, outcome.stats),
    }


def answer_of(job: Job, outcome: Outcome) -> tuple[str, Completion]:
    """The text of the answer so far, and what it says."""
    prompt = job.prompt
    shown = [token for token in outcome.token_ids if token not in job.eos_token_ids]
    text = text_of(job.tokenizer, shown, job.arguments.stop)
    return text, parse_answer(text, outcome.complete, prompt.thinking_mode, prompt.tools)


def describe_logprobs(tokenizer: Tokenizer, stats: RunStats | None) -> list[dict[str, Any]] | None:
    """Log-probabilities with the texts of their tokens, None where none were asked for."""
    if stats is None or stats.logprobs is None:
        return None

    def described(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token_id, "text": text_of(tokenizer, [token_id]), "logprob": logprob}

    found = []
    for chosen in stats.logprobs:
        top = [described(*one) for one in chosen.top]
        found.append({**described(chosen.token_id, chosen.logprob), "top": top})
    return found


def config_record(job: Job, engine: Engine | None) -> dict[str, Any]:
    """Flags and configurations; the engine's as asked for unless there is one."""
    return {
        "arguments": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(job.arguments).items()
        },
        "engine": asdict(job.engine_config if engine is None else engine.engine_config),
        "model": asdict(job.model_config),
        "sampling": asdict(job.sampling),
        "eos_token_ids": sorted(job.eos_token_ids),
    }


def ops_name(engine: Engine) -> str:
    """The op table that the engine uses, after "auto" was decided."""
    native = engine.table.portable is not None
    return "native" if native else table_name(engine.engine_config, engine.devices)


def device_names(engine: Engine) -> list[str]:
    """The devices that hold layers, in their order."""
    devices = dict.fromkeys(engine.devices)
    return [f"{d} {torch.cuda.get_device_name(d)}" if d.type == "cuda" else str(d) for d in devices]


def timing(load_seconds: float | None, stats: RunStats | None) -> dict[str, Any]:
    """The measured times as the JSON report has them; what was not measured is ``None``."""
    ran = _NOTHING_RAN if stats is None else stats
    prefilled = ran.prefill_tokens
    decoded = ran.decode_tokens
    return {
        "load_seconds": load_seconds,
        "reused_tokens": ran.reused_tokens,
        "prefill_tokens": prefilled,
        "prefill_seconds": ran.prefill_seconds,
        "prefill_tokens_per_second": prefilled / ran.prefill_seconds if prefilled else None,
        "decode_tokens": decoded,
        "decode_seconds": ran.decode_seconds,
        "decode_ms_per_token": 1000 * ran.decode_seconds / decoded if decoded else None,
        "decode_tokens_per_second": decoded / ran.decode_seconds if decoded else None,
        "drafts": draft_record(ran.drafts),
    }


def graph_mode(engine: Engine | None) -> str | None:
    """The mode of the captured graphs that decode, None without."""
    return None if engine is None or engine.decoder is None else engine.decoder.mode


def summary_line(measured: dict[str, Any], mode: str | None, finish_reason: str) -> str:
    """One line: prefill tokens and tok/s, tokens that were there before, decode tokens, ms/token
    and tok/s, mode of the graphs, why it ended; before that the load, unless it was measured for
    another line.
    """
    prefill = measured["prefill_tokens_per_second"]
    decode = measured["decode_tokens_per_second"]
    load = measured["load_seconds"]
    parts = [] if load is None else [f"load {load:.1f} s"]
    parts.append(f"prefill {measured['prefill_tokens']} tokens")
    if prefill is not None:
        parts[-1] += f" {prefill:.1f} tok/s"
    if measured["reused_tokens"]:
        parts[-1] += f" behind {measured['reused_tokens']} reused"
    parts.append(f"decode {measured['decode_tokens']} tokens")
    if decode is not None:
        parts[-1] += f" {measured['decode_ms_per_token']:.1f} ms/token {decode:.1f} tok/s"
    if mode is not None:
        parts[-1] += f" (cuda graph {mode})"
    if measured["drafts"] is not None:
        parts.append(draft_summary(measured["drafts"]))
    return " · ".join([*parts, finish_reason])
