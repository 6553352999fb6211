"""``bench engine --model``: load, prefill and decode of a checkpoint, and the time to the first
token.
"""

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsv4.bench.decode_modes import DecodeMode, DecodeModes
from dsv4.bench.geometry import placement_record
from dsv4.bench.random_engine import random_ids
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.cli.job import check_model_folder
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.measure.provenance import ROOT
from dsv4.ops.tables import Table
from dsv4.parallel.devices import engine_devices

# Tokens behind those that are asked for: decoding warms up with some.
_ROOM = 64


@dataclass(frozen=True)
class CheckpointRun:
    """The run that ``bench engine --model`` measures. ``modes`` None: all that the op table has.

    ``engine`` says where and how; its ``max_context`` is set to what the tokens need. ``table``
    None: the op table that ``engine`` asks for.
    """

    model: Path
    engine: EngineConfig
    prompt_tokens: int
    decode_tokens: int
    repeats: int
    modes: tuple[DecodeMode, ...] | None = None
    profile: bool = False
    table: Table | None = None

    @property
    def max_context(self) -> int:
        """Tokens."""
        return self.prompt_tokens + self.decode_tokens + _ROOM

    def check_model(self) -> None:
        """Raises ``UserError`` without such a folder, and for more tokens than the model has."""
        check_model_folder(self.model)
        most = ModelConfig.from_folder(self.model).max_position_embeddings - _ROOM
        if self.decode_tokens >= most:
            expected = f"at most {most - 1}"
            raise UserError(f"--decode-tokens: found {self.decode_tokens}, expected {expected}")
        if self.prompt_tokens + self.decode_tokens > most:
            found = f"found {self.prompt_tokens} with --decode-tokens {self.decode_tokens}"
            expected = f"at most {most - self.decode_tokens}"
            raise UserError(f"--prompt-tokens: {found}, expected {expected}")


def bench_checkpoint(run: CheckpointRun, write_text: Callable[[str], object]) -> dict[str, Any]:
    """Median seconds of load and of the prefill of ``prompt_tokens`` random ids, the decode behind
    them by mode, and with ``profile`` the kernels of one token of every captured mode, whose tables
    ``write_text`` gets.
    """
    limit_cpu_threads(ModelConfig.from_folder(run.model))
    load = []
    prefill = []
    engine = None
    for _ in range(run.repeats):
        del engine  # Two do not fit.
        gc.collect()
        torch.cuda.empty_cache()
        started = time.perf_counter()
        engine = _load(run)
        load.append(time.perf_counter() - started)
        ids = random_ids(engine, run.prompt_tokens, 0)
        started = time.perf_counter()
        float(engine.prefill(ids).max())
        prefill.append(time.perf_counter() - started)
    assert engine is not None
    modes = DecodeModes(engine, run.modes)
    decode = modes.measure(run.prompt_tokens, run.decode_tokens)
    profiles = modes.profile(run.prompt_tokens) if run.profile else {}
    for mode, profile in profiles.items():
        write_text(f"{mode}\n{profile.table()}\n")
    return {
        "model": str(run.model),
        "native": engine.table.portable is not None,
        "placement": placement_record(run.engine.parallel, engine.devices),
        "prefill_chunk": engine.engine_config.prefill_chunk,
        "prefill_activations": engine.engine_config.prefill_activations,
        "prompt_tokens": run.prompt_tokens,
        "load_seconds": statistics.median(load),
        "prefill_tokens_per_second": run.prompt_tokens / statistics.median(prefill),
        "decode_tokens": run.decode_tokens,
        "decode": decode,
        "profile": {mode: profile.record(nodes=False) for mode, profile in profiles.items()},
    }


def _load(run: CheckpointRun) -> Engine:
    config = replace(run.engine, max_context=run.max_context)
    table = run.table
    return Engine.load(run.model, config, change_table=None if table is None else lambda _: table)


def bench_first_token(run: CheckpointRun) -> dict[str, Any]:
    """Median seconds from starting the driver to the end of a run that produces one token; on CUDA
    also the first run with an empty kernel cache.
    """
    on_cuda = engine_devices(run.engine)[0].type == "cuda"
    seconds = [_first_token_seconds(run, {}) for _ in range(run.repeats)]
    measured = {"process_start_to_first_token_seconds": statistics.median(seconds)}
    if on_cuda:
        with tempfile.TemporaryDirectory() as cache:
            cold = _first_token_seconds(run, {"DSV4_KERNEL_CACHE": cache})
        measured["process_start_to_first_token_seconds_without_kernel_cache"] = cold
    return measured


def _first_token_seconds(run: CheckpointRun, environment: dict[str, str]) -> float:
    engine = run.engine
    flags = {
        "--model": run.model,
        "--device": engine.device,
        "--gpus": engine.gpus,
        "--parallel": engine.parallel,
        "--ops": engine.ops,
        "--prefill-chunk": engine.prefill_chunk,
        "--prefill-activations": engine.prefill_activations,
        "--draft": engine.draft,
        "--max-tokens": 1,
    }
    given = [str(part) for flag in flags.items() if flag[1] is not None for part in flag]
    command = [sys.executable, str(ROOT / "single_shot_inference.py"), *given, "--quiet"]
    started = time.perf_counter()
    result = subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    if result.returncode != 0:
        raise UserError(f"the driver failed: {result.stderr.strip().removeprefix('error: ')}")
    return time.perf_counter() - started
