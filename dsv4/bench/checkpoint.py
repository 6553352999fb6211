"""``bench engine --model``: load, prefill and decode of a checkpoint, and the time to the first
token.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch

from dsv4.bench.decode_modes import DecodeMode, DecodeModes
from dsv4.cli.cpu_threads import limit_cpu_threads
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.measure.provenance import ROOT


def bench_checkpoint(
    model: Path,
    device: Literal["cpu", "cuda"],
    prompt_tokens: int,
    decode_tokens: int,
    repeats: int,
    modes: tuple[DecodeMode, ...],
) -> dict[str, Any]:
    """Median seconds of load and of the prefill of ``prompt_tokens`` random ids, and the decode
    behind them by mode.
    """
    limit_cpu_threads(ModelConfig.from_folder(model))
    config = EngineConfig(device=device, max_context=prompt_tokens + decode_tokens + 64)
    load = []
    prefill = []
    for _ in range(repeats):
        started = time.perf_counter()
        engine = Engine.load(model, config)
        load.append(time.perf_counter() - started)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            engine.config.vocab_size, (prompt_tokens,), generator=generator
        ).tolist()
        started = time.perf_counter()
        float(engine.prefill(ids).max())
        prefill.append(time.perf_counter() - started)
    decode = DecodeModes(engine, modes)
    return {
        "prompt_tokens": prompt_tokens,
        "load_seconds": statistics.median(load),
        "prefill_tokens_per_second": prompt_tokens / statistics.median(prefill),
        "decode_tokens": decode_tokens,
        "decode": decode.measure(prompt_tokens, decode_tokens),
    }


def bench_first_token(model: Path, device: Literal["cpu", "cuda"], repeats: int) -> dict[str, Any]:
    """Median seconds from starting the driver to the end of a run that produces one token; on CUDA
    also the first run with an empty kernel cache.
    """
    seconds = [_first_token_seconds(model, device, {}) for _ in range(repeats)]
    measured = {"process_start_to_first_token_seconds": statistics.median(seconds)}
    if device == "cuda":
        with tempfile.TemporaryDirectory() as cache:
            cold = _first_token_seconds(model, device, {"DSV4_KERNEL_CACHE": cache})
        measured["process_start_to_first_token_seconds_without_kernel_cache"] = cold
    return measured


def _first_token_seconds(model: Path, device: str, environment: dict[str, str]) -> float:
    command = [
        sys.executable,
        str(ROOT / "single_shot_inference.py"),
        "--model",
        str(model),
        "--device",
        device,
    ]
    started = time.perf_counter()
    subprocess.run(
        [*command, "--max-tokens", "1", "--quiet"],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    return time.perf_counter() - started
