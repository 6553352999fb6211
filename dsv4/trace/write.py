"""Writing traces of an engine to files: of given tokens, and of a generation."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import dsv4
from dsv4.engine import Engine
from dsv4.layers.values import Watch
from dsv4.measure.provenance import version_of
from dsv4.ops.tables import DirectTable
from dsv4.token_ids import check_ids
from dsv4.trace.file import TraceFile
from dsv4.trace.patterns import EVERY_VALUE, matching


def write_trace(
    engine: Engine,
    token_ids: Sequence[int],
    path: str | Path,
    at: Sequence[str] = EVERY_VALUE,
    prompt_tokens: int | None = None,
    model: str = "",
) -> None:
    """``Engine.trace`` into the file ``path``, which replaces an older one when it is complete.

    ``model``: the checkpoint's name, for the file's metadata. Raises ``UserError`` for ids that are
    none, for a pattern without a value, for a path that cannot be a file, and when the disk has no
    room.
    """
    token_ids = check_ids(token_ids, engine.config.vocab_size)
    prompt_tokens = len(token_ids) if prompt_tokens is None else prompt_tokens
    metadata = trace_metadata(engine, model)
    with TraceFile(Path(path), metadata, len(token_ids), prompt_tokens) as file:
        engine.run_traced(token_ids, Watch(file.add, matching(engine.config, at)), prompt_tokens)


def trace_metadata(engine: Engine, model: str) -> dict[str, str]:
    """The header's metadata (traces.md#metadata), without what the file itself counts."""
    settings = {**asdict(engine.engine_config), "devices": [str(d) for d in engine.state.devices]}
    mode = None if engine.decoder is None else engine.decoder.mode
    return {
        "engine": "dsv4",
        "versions": json.dumps(_versions()),
        # A folder's name may hold bytes that are no UTF-8, which safetensors cannot read.
        "model": model.encode("utf-8", "backslashreplace").decode(),
        "config": json.dumps(asdict(engine.config)),
        "settings": json.dumps({**settings, "cuda_graph": mode}),
        "form": "torch" if isinstance(engine.table, DirectTable) else "launches",
    }


def _versions() -> dict[str, str]:
    found = {"dsv4": dsv4.__version__, "python": platform.python_version()}
    found["torch"] = str(torch.__version__)
    for package in ("transformers", "nvidia-cutlass-dsl", "cuda-core"):
        version = version_of(package)
        if version is not None:
            found[package] = version
    return found
