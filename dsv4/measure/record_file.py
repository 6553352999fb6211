"""The file of a command's ``--json``: what it found, and where that comes from."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4.command.output_file import write_output
from dsv4.measure.provenance import provenance


def write_record(
    path: Path | None, module: str, arguments: Sequence[str], found: Mapping[str, Any]
) -> None:
    """Writes ``found`` behind the provenance of ``python -m module arguments``; nothing where
    ``path`` is None. Raises ``UserError`` as ``write_output`` does.
    """
    if path is None:
        return
    called = " ".join([f"python -m {module}", *arguments])
    record = {**provenance(called), **found}
    write_output("--json", path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
