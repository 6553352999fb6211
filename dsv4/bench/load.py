"""``bench load``: how fast a checkpoint of a published geometry gets from its files to the
devices.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dsv4.checkpoint import (
    Layout,
    describe,
    load_weights,
    open_checkpoint,
    synthetic_weights,
    write_weights,
)
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.parallel.devices import engine_devices
from dsv4.parallel.placement import Placement, bytes_by_layer


def bench_load(
    raw_config: dict[str, Any], layout: Layout, engine: EngineConfig, repeats: int
) -> dict[str, Any]:
    """GB/s of ``load_weights`` on random weights in a temporary folder: once with the files out of
    the page cache, as far as the system lets them go, then ``repeats`` times with the files in it.

    The weights are drawn on the first device: a GPU draws in a second what takes a CPU minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        device = engine_devices(engine)[0]
        config = ModelConfig.from_dict(raw_config)
        write_weights(
            path, raw_config, layout, synthetic_weights(config, layout, 0, lambda _: device)
        )
        torch.cuda.empty_cache()
        for file in path.glob("*.safetensors"):
            _forget(file)
        rates = [_gb_per_s(path, engine) for _ in range(1 + repeats)]
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return {
        "layers": raw_config["num_hidden_layers"],
        "gigabytes": round(size / 1e9, 2),
        "gpus": engine.gpus,
        "parallel": engine.parallel,
        "cold_gb_per_s": rates[0],
        "warm_gb_per_s": rates[1:],
    }


def _gb_per_s(path: Path, engine: EngineConfig) -> float:
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_dict(checkpoint.raw_config)
    sizes = [(one.parameter.name, one.nbytes) for one in describe(checkpoint, config)]
    layer_bytes = bytes_by_layer(sizes, config.num_hidden_layers)
    placement = Placement.of(engine, engine_devices(engine), layer_bytes)
    for device in set(placement.layer_devices):
        torch.zeros(1, device=device)  # The first use of a device takes its time.
    started = time.perf_counter()
    weights = load_weights(checkpoint, config, device_of=placement.device_of)
    seconds = time.perf_counter() - started
    del weights
    torch.cuda.empty_cache()
    return round(sum(nbytes for _, nbytes in sizes) / seconds / 1e9, 2)


def _forget(file: Path) -> None:
    """Drops a file from the page cache. Unwritten pages stay, so the file is synced first."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
