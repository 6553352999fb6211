"""The driver's flags of speculative decoding."""

import argparse
import os
from pathlib import Path

from dsv4.command.flags import path
from dsv4.demo import CHECKPOINT, DRAFTS
from dsv4.limits import MAX_DRAFTS

MEASURED = "auto"


def add_draft_flags(group: argparse._ArgumentGroup) -> None:
    """Which draft module runs, with how many drafts, and where its weights are."""
    group.add_argument(
        "--draft",
        choices=("auto", "off", "mtp", "dspark"),
        default="auto",
        help="the draft module, docs/speculative.md; auto: that of --draft-weights, or with the "
        "CUDA ops the checkpoint's own where there is room for it, as long as its drafts make "
        "decoding faster (default: auto)",
    )
    group.add_argument(
        "--draft-tokens",
        type=draft_tokens,
        metavar="N",
        help=f"drafts of a step, 1 to {MAX_DRAFTS}; auto: what is fastest by measured "
        "acceptance and times (default: as many as the module was trained to make, with "
        "--draft auto these or none)",
    )
    group.add_argument(
        "--draft-weights",
        type=path,
        metavar="FOLDER",
        help="a folder that holds the draft module (default: --model)",
    )


def draft_tokens(text: str) -> int | str:
    """A flag type: a number of drafts, or auto."""
    if text == MEASURED:
        return text
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:4]) <= MAX_DRAFTS:
        expected = f"auto or an integer from 1 to {MAX_DRAFTS}"
        raise argparse.ArgumentTypeError(f"found {text[:80]!r}, expected {expected}")
    return int(text)


def draft_folder(arguments: argparse.Namespace) -> Path | None:
    """``--draft-weights``; of the embedded demo the folder of the module that ``--draft`` names."""
    given: Path | None = arguments.draft_weights
    if given is not None:
        return given
    is_demo = os.path.realpath(arguments.model) == os.path.realpath(CHECKPOINT)
    if is_demo and arguments.draft in DRAFTS and DRAFTS[arguments.draft].is_dir():
        return DRAFTS[arguments.draft]
    return None


def drafts_asked_for(arguments: argparse.Namespace) -> dict[str, str | int]:
    """The draft flags that were given, by name; of the folder its name."""
    given: dict[str, str | int] = {}
    if arguments.draft != "auto":
        given["draft"] = arguments.draft
    if arguments.draft_tokens is not None:
        given["draft_tokens"] = arguments.draft_tokens
    if arguments.draft_weights is not None:
        given["draft_weights"] = Path(arguments.draft_weights).resolve().name
    return given
