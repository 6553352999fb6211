"""How drafts did in the last run of an engine's steps."""

from dsv4.run_stats import DraftStats
from dsv4.speculative.recorded_steps import DraftedRecordedSteps
from dsv4.speculative.steps import DraftedSteps


def draft_stats(steps: object) -> DraftStats | None:
    """Of ``steps``; None for steps without drafts."""
    if isinstance(steps, DraftedSteps | DraftedRecordedSteps):
        return steps.drafted.stats()
    return None
