"""What drafts were worth in a run: for the summary line and the JSON file."""

from typing import Any

from dsv4.run_stats import DraftStats


def draft_record(stats: DraftStats | None) -> dict[str, Any] | None:
    """Counts and times as the JSON report has them; None for a run without a draft module or
    without a decode step.
    """
    if stats is None or not stats.steps:
        return None
    return {
        "steps": stats.steps,
        "tokens_per_step": stats.tokens_per_step,
        "drafted": list(stats.drafted),
        "accepted": list(stats.accepted),
        "acceptance": list(stats.acceptance),
        "draft_us_per_step": 1e6 * stats.draft_seconds / stats.steps,
        "verify_us_per_step": 1e6 * stats.verify_seconds / stats.steps,
    }


def draft_summary(record: dict[str, Any]) -> str:
    """``drafts 1.7 tokens a step, accepted 71/38 %, draft 210 µs, verify 900 µs``."""
    parts = [f"drafts {record['tokens_per_step']:.2f} tokens a step"]
    if record["acceptance"]:
        shares = "/".join(f"{100 * share:.0f}" for share in record["acceptance"])
        parts.append(f"accepted {shares} %")
    parts.append(f"draft {record['draft_us_per_step']:.0f} µs")
    parts.append(f"verify {record['verify_us_per_step']:.0f} µs")
    return ", ".join(parts)
