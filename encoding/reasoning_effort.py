"""Reasoning-effort prefixes of both prompt profiles, and a checkpoint's profile
(model.md#reasoning-effort).
"""

import json
import re
from pathlib import Path
from typing import Literal

from .json_text import parse_integer

Profile = Literal["preview", "official"]

_ABSOLUTE_MAXIMUM = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate "
    "step, considered alternative, and rejected hypothesis to ensure absolutely no assumption "
    "is left unchecked.\n\n"
)
_BEYOND_MAXIMUM = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every "
    "causal chain to its root, and resolve the underlying cause rather than any surface "
    "symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple "
    "angles and are certain that no assumption remains unchecked and no error remains "
    "undiscovered.\n\n"
)

# profile -> effort -> text written before the first message; None is the effort of a caller who
# names none.
_PREFIXES: dict[str, dict[str | None, str]] = {
    "preview": {None: "", "high": "", "max": _ABSOLUTE_MAXIMUM},
    "official": {None: "", "low": "", "high": _ABSOLUTE_MAXIMUM, "max": _BEYOND_MAXIMUM},
}
# What callers of chat APIs may ask for; what a profile lacks folds to what it has
# (model.md#reasoning-effort).
_API_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
_FOLDED_EFFORTS = {
    "preview": {"minimal": "high", "low": "high", "medium": "high", "xhigh": "high"},
    "official": {"minimal": "low", "medium": "low", "xhigh": "high"},
}

_DEFAULT_EFFORT_LOW = re.compile(
    r"""^DEFAULT_REASONING_EFFORT\b[^=\n]*=\s*["']low["']""", re.MULTILINE
)
_EFFORT_TABLE_KEY = r"""["']{}["']\s*:"""


def effort_prefix(effort: str | None, profile: str) -> str:
    """Text that opens a thinking prompt. ValueError for an unknown profile, or an effort that the
    profile lacks.
    """
    prefixes = _PREFIXES.get(profile) if isinstance(profile, str) else None
    if prefixes is None:
        raise ValueError(f"profile is {profile!r}, expected one of {', '.join(_PREFIXES)}")
    if not (effort is None or isinstance(effort, str)) or effort not in prefixes:
        names = ", ".join(name for name in prefixes if name is not None)
        raise ValueError(
            f"reasoning_effort is {effort!r:.80}, "
            f"expected None or one of {names} for the {profile} profile"
        )
    return prefixes[effort]


def fold_reasoning_effort(effort: str, profile: str) -> str:
    """The profile's own name for an API effort: minimal, low, medium, high, xhigh or max.

    Official weights know low, high and max: minimal and medium are low, xhigh is high. Preview
    weights know high and max: everything below max is high. ValueError for other names.
    """
    if effort not in _API_EFFORTS:
        names = ", ".join(_API_EFFORTS)
        raise ValueError(f"reasoning_effort is {effort!r:.80}, expected one of {names}")
    folded = _FOLDED_EFFORTS.get(profile, {}).get(effort, effort)
    effort_prefix(folded, profile)
    return folded


def detect_profile(checkpoint_dir: str | Path) -> Profile:
    """The training profile of the checkpoint in `checkpoint_dir`.

    1. Its own `encoding/encoding_dsv4.py` decides where it is shipped: "official" if it sets
       `DEFAULT_REASONING_EFFORT = "low"` and has a table with the keys low, high and max, else
       "preview".
    2. Without that file: "official" if config.json has `dspark_*` keys, which came with the
       official releases. (The DSpark builds of the preview weights have them too, but ship the
       file.)
    3. Else "preview".

    The file is only read, never run. ValueError if config.json is needed and is not a JSON object.
    """
    root = Path(checkpoint_dir)
    shipped_encoder = root / "encoding" / "encoding_dsv4.py"
    if shipped_encoder.is_file():
        source = shipped_encoder.read_text(encoding="utf-8", errors="replace")
        has_table = all(
            re.search(_EFFORT_TABLE_KEY.format(name), source) for name in ("low", "high", "max")
        )
        return "official" if has_table and _DEFAULT_EFFORT_LOW.search(source) else "preview"
    config_file = root / "config.json"
    if not config_file.is_file():
        return "preview"
    return (
        "official"
        if any(key.startswith("dspark_") for key in _read_object(config_file))
        else "preview"
    )


def _read_object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes(), parse_int=parse_integer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
