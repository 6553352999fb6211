"""Benchmarks of the engine, written as JSON files that documents may quote: ``python -m dsv4.bench engine --help``.

Every file says on what machine, with which versions, from which commit and by which command it was made.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch

import dsv4
from dsv4.config import EngineConfig, ModelConfig
from dsv4.cpu_threads import limit_cpu_threads
from dsv4.demo import CHECKPOINT
from dsv4.engine import Engine
from dsv4.errors import UserError

ROOT = Path(__file__).parent.parent


def bench_engine(
    model: Path, device: Literal["cpu", "cuda"], prompt_tokens: int, decode_tokens: int, repeats: int
) -> dict[str, Any]:
    """Median seconds of load, prefill of ``prompt_tokens`` and of one decode step behind them, on random token ids."""
    limit_cpu_threads(ModelConfig.from_folder(model))
    load, prefill, step = [], [], []
    for _ in range(repeats):
        started = time.perf_counter()
        engine = Engine.load(model, EngineConfig(device=device, max_context=prompt_tokens + decode_tokens))
        load.append(time.perf_counter() - started)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(engine.config.vocab_size, (prompt_tokens + decode_tokens,), generator=generator).tolist()
        started = time.perf_counter()
        float(engine.prefill(ids[:prompt_tokens]).max())
        prefill.append(time.perf_counter() - started)
        for token in ids[prompt_tokens:]:
            started = time.perf_counter()
            float(engine.decode([token]).max())
            step.append(time.perf_counter() - started)
    return {
        "prompt_tokens": prompt_tokens,
        "load_seconds": statistics.median(load),
        "prefill_tokens_per_second": prompt_tokens / statistics.median(prefill),
        "decode_ms_per_token": 1e3 * statistics.median(step),
        "decode_ms_per_token_p90": 1e3 * statistics.quantiles(step, n=10)[-1],
        "decode_tokens_per_second": 1 / statistics.median(step),
    }


def bench_first_token(model: Path, device: Literal["cpu", "cuda"], repeats: int) -> dict[str, Any]:
    """Median seconds from starting the driver to the end of a run that produces one token."""
    command = [sys.executable, str(ROOT / "single_shot_inference.py"), "--model", str(model), "--device", device]
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run([*command, "--max-tokens", "1", "--quiet"], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    return {"process_start_to_first_token_seconds": statistics.median(seconds)}


def provenance(command: str) -> dict[str, Any]:
    """Machine, versions, commit and ``command`` of this process."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False).stdout
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "command": command,
        "commit": (commit or "unknown") + ("+changes" if changed else ""),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cpu": _cpu_name(), "torch_threads": torch.get_num_threads(), "gpus": gpus},
        "versions": {"dsv4": dsv4.__version__, "python": platform.python_version(), "torch": str(torch.__version__)},
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main(argv: list[str] | None = None) -> int:
    """The command: 0, or 2 for a user error (one line on stderr)."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m dsv4.bench", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    engine = kinds.add_parser("engine", help="load, prefill and decode of a checkpoint, eager")
    engine.add_argument("--model", type=Path, default=CHECKPOINT)
    engine.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    engine.add_argument("--prompt-tokens", type=int, default=512)
    engine.add_argument("--decode-tokens", type=int, default=64)
    engine.add_argument("--repeats", type=int, default=3)
    engine.add_argument("--out", type=Path, help="write the JSON here as well as to stdout")
    options = parser.parse_args(arguments)
    try:
        result = bench_engine(
            options.model, options.device, options.prompt_tokens, options.decode_tokens, options.repeats
        )
        result |= bench_first_token(options.model, options.device, options.repeats)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    command = " ".join(["python -m dsv4.bench", *arguments])
    text = json.dumps({**provenance(command), "result": result}, indent=2) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
