"""The file of a command's ``--json``: what it found, and where that comes from."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4.command.output_file import check_output, refuse_shared_files, write_output
from dsv4.measure.provenance import provenance


def parse_recorded(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """The flags of ``parser`` and ``--json``. Raises ``UserError`` for a file that cannot be
    written, or is one of the model.
    """
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(arguments)
    if options.json is not None:
        refuse_shared_files([], [("--json", options.json)], vars(options).get("model"))
        check_output("--json", options.json)
    return options


def write_record(
    path: Path | None, module: str, arguments: Sequence[str], found: Mapping[str, Any]
) -> None:
    """Writes ``found`` behind the provenance of ``python -m module arguments``; nothing where
    ``path`` is None. Raises ``UserError`` as ``write_output`` does.
    """
    if path is None:
        return
    called = " ".join([f"python -m {module}", *arguments])
    write_output("--json", path, record_text({**provenance(called), **found}))


def record_text(record: Mapping[str, Any]) -> str:
    """A record as JSON with a final line break. Numbers that JSON does not have are strings: "NaN",
    "Infinity" and "-Infinity".
    """
    known = json.loads(json.dumps(record), parse_constant=str)
    return json.dumps(known, indent=2, ensure_ascii=False) + "\n"
