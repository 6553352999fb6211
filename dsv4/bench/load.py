"""``bench load``: how fast a checkpoint of a published geometry gets from its files to the devices
and is packed there, beside what the files and the links give by themselves.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from dsv4.bench.context_memory import refuse_too_many_layers
from dsv4.caches.allocation import COMPUTE_DTYPES
from dsv4.checkpoint import (
    Layout,
    load_ranks,
    loading_ranks,
    staging,
    synthetic_weights,
    write_weights,
)
from dsv4.checkpoint.identity import checkpoint_identity
from dsv4.checkpoint.packed_cache import PackedCache
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.layers.weights import ReadOnce
from dsv4.model import build_ranks
from dsv4.opened_checkpoint import OpenedCheckpoint
from dsv4.parallel.devices import engine_devices

_READERS = (8, 16, 32)
_SHARD_BYTES = 2 * 10**9
_COPIES = 64
_CONTEXT = 512
_PROMPT = list(range(16))


def bench_load(
    raw_config: dict[str, Any],
    layout: Layout,
    engines: Sequence[EngineConfig],
    repeats: int,
    cold: bool,
    log: Callable[[str], object],
) -> dict[str, Any]:
    """Rates in GB/s and seconds of random weights in a temporary folder (``TMPDIR``), by each of
    ``engines``: ``repeats`` times with the files in the page cache, with ``cold`` before that once
    without, as far as the system lets them go. ``LoadBench`` says what; ``log`` is told on the way.

    The weights are drawn on the first device: a GPU draws in a second what takes a CPU minutes.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        device = engine_devices(engines[0])[0]
        config = ModelConfig.from_dict(raw_config)
        if device.type == "cpu":
            refuse_too_many_layers(config, layout, engines[0])
        weights = synthetic_weights(config, layout, 0, lambda _: device)
        write_weights(folder, raw_config, layout, weights, shard_bytes=_SHARD_BYTES)
        del weights
        torch.cuda.empty_cache()
        placements = []
        for engine in engines:
            bench = LoadBench(folder, Path(temporary) / "packed", engine, engine_devices(engine))
            found: dict[str, Any] = {"gpus": engine.gpus, "parallel": engine.parallel}
            for part in bench.measured(repeats, cold, with_tokens=not placements):
                log(f"{part}\n")
                found |= part
            placements.append(found)
        return {
            "layers": raw_config["num_hidden_layers"],
            "gigabytes": round(sum(file.stat().st_size for file in _files(folder)) / 1e9, 2),
            "readers": staging.reader_count(),
            "buffer_mib": staging.STAGING_BYTES / (1 << 20),
            "placements": placements,
        }


class LoadBench:
    """Measurements of one checkpoint ``folder``; ``packed``: a folder for its packed weights."""

    def __init__(
        self, folder: Path, packed: Path, engine: EngineConfig, devices: Sequence[torch.device]
    ) -> None:
        self._folder = folder
        self._packed = packed
        self._engine = engine
        self._devices = devices
        self._files = _files(folder)
        self._opened = OpenedCheckpoint.open(folder, engine)
        self._bytes = sum(file.stat().st_size for file in self._files)

    def measured(self, repeats: int, cold: bool, with_tokens: bool) -> Iterator[dict[str, Any]]:
        """All of it, part by part; ``with_tokens``: also the first ones of processes."""
        yield self.rates(repeats, cold)
        yield self.seconds(repeats)
        if with_tokens:
            yield self.first_tokens()

    def rates(self, repeats: int, cold: bool) -> dict[str, Any]:
        """GB/s of plain reads (by threads), of copies of pinned memory (to each device alone, and
        to all at once) and of loading; the seconds of a load before its first byte is there
        (names, shapes, memory), and without them the rate, as a share of what reads and copies
        allow.
        """
        found: dict[str, Any] = {}
        if cold:
            found["cold_plain_read_gb_per_s"] = self._rate(self._cold(self._read_plainly))
            found["cold_gb_per_s"] = self._rate(self._cold(lambda: self._load()[1]))
        plain = {count: self._rate(self._read_plainly(count)) for count in _READERS}
        links = _copy_rates(self._devices)
        at_once = sum(_copy_rates(self._devices, at_once=True))
        self._load()  # Makes pinned memory, and the devices ready.
        loads = [self._load() for _ in range(repeats)]
        bytes_alone = [self._rate(seconds - preparing) for preparing, seconds in loads]
        ceiling = min(max(plain.values()), at_once or math.inf)
        return found | {
            "plain_read_gb_per_s": plain,
            "copy_gb_per_s": links,
            "copies_at_once_gb_per_s": round(at_once, 2),
            "warm_gb_per_s": [self._rate(seconds) for _, seconds in loads],
            "warm_preparing_seconds": _rounded(preparing for preparing, _ in loads),
            "warm_gb_per_s_of_bytes_alone": bytes_alone,
            "warm_share_of_ceiling": round(statistics.median(bytes_alone) / ceiling, 3),
        }

    def seconds(self, repeats: int) -> dict[str, Any]:
        """Seconds of packing alone, of loading and packing together, of that with writing the
        packed weights, and of reading them with what is not packed.
        """
        self._start(None)
        found: dict[str, Any] = {
            "packing_alone_seconds": round(self._pack_alone(), 3),
            "load_and_pack_seconds": _rounded(self._start(None) for _ in range(repeats)),
        }
        # Pipelines of any length share an entry.
        if not self._cache().entry.exists():
            found["pack_and_write_cache_seconds"] = round(self._start(self._cache()), 3)
        seconds = [self._start(self._cache()) for _ in range(repeats)]
        size = sum(file.stat().st_size for file in _files(self._cache().entry))
        return found | {
            "packed_cache_gigabytes": round(size / 1e9, 4),
            "packed_cache_seconds": _rounded(seconds),
            "packed_cache_gb_per_s": [round(size / one / 1e9, 2) for one in seconds],
        }

    def first_tokens(self) -> dict[str, Any]:
        """Seconds from the start of a process to its first token: with packing, which may compile
        kernels, from packed weights, and with packing again.
        """
        torch.cuda.empty_cache()
        kept = replace(self._engine, packed_cache=self._packed)
        names = ("first_start", "start_from_packed_cache", "start_with_packing")
        engines = (self._engine, kept, self._engine)
        return {
            name: self._first_token(engine) for name, engine in zip(names, engines, strict=True)
        }

    def _rate(self, seconds: float) -> float:
        """In GB/s: four digits, because small checkpoints come at a thousandth of the rate."""
        return float(f"{self._bytes / seconds / 1e9:.4g}")

    def _cold(self, measure: Callable[[], float]) -> float:
        for file in self._files:
            _forget(file)
        return measure()

    def _read_plainly(self, threads: int | None = None) -> float:
        """Seconds of reading all files by threads into memory of their own, in the pieces of a
        load.
        """
        size = staging.STAGING_BYTES
        pieces = iter(
            [(file, at) for file in self._files for at in range(0, file.stat().st_size, size)]
        )
        taking = Lock()

        def read(memory: torch.Tensor) -> None:
            buffer = memory.numpy().data
            while True:
                with taking:
                    piece = next(pieces, None)
                if piece is None:
                    return
                with piece[0].open("rb", buffering=0) as file:
                    file.seek(piece[1])
                    file.readinto(buffer)

        count = threads or staging.reader_count()
        buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]
        started = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(read, buffers))
        return time.perf_counter() - started

    def _load(self) -> tuple[float, float]:
        """Seconds of a load until the first byte of a matrix is read, and until the last has
        arrived.
        """
        opened = self._opened
        started = time.perf_counter()
        found = opened.found
        with loading_ranks(opened.checkpoint, opened.config, opened.placement, found=found):
            preparing = time.perf_counter() - started
        return preparing, self._since(started)

    def _pack_alone(self) -> float:
        """Seconds of packing what is loaded."""
        opened = self._opened
        ranks = load_ranks(opened.checkpoint, opened.config, opened.placement)
        once = [ReadOnce(rank) for rank in ranks]
        del ranks
        started = time.perf_counter()
        self._build(once)
        return self._since(started)

    def _cache(self) -> PackedCache:
        opened = self._opened
        identity = checkpoint_identity(opened.checkpoint)
        name = opened.table.packing.name
        return PackedCache(self._packed, opened.checkpoint, identity, name, opened.placement.ranks)

    def _start(self, cache: PackedCache | None) -> float:
        """Seconds until all weights are packed, on their devices, and kept where they are."""
        started = time.perf_counter()
        with self._opened.reading(None, None, cache) as ranks:
            self._build(ranks)
        return self._since(started)

    def _build(self, ranks: Sequence[ReadOnce]) -> None:
        opened = self._opened
        dtype = COMPUTE_DTYPES[self._engine.compute_dtype]
        build_ranks(opened.config, ranks, opened.table.packing, opened.placement, dtype)

    def _since(self, started: float) -> float:
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return time.perf_counter() - started

    def _first_token(self, engine: EngineConfig) -> dict[str, float]:
        """Seconds from the start of a process that imports, loads and answers."""
        context = get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as process:
            return process.submit(_first_token, self._folder, engine, time.time()).result()


def _first_token(folder: Path, engine: EngineConfig, started: float) -> dict[str, float]:
    imported = time.time() - started
    loaded = Engine.load(folder, replace(engine, max_context=_CONTEXT))
    ready = time.time() - started
    next(iter(loaded.generate(_PROMPT, 1, stop_token_ids=())))
    seconds = {"imported": imported, "loaded": ready, "first_token": time.time() - started}
    return {name: round(value, 3) for name, value in seconds.items()}


def _rounded(seconds: Iterable[float]) -> list[float]:
    return [round(one, 3) for one in seconds]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _copy_rates(devices: Sequence[torch.device], at_once: bool = False) -> list[float]:
    """GB/s of copies of pinned memory to each of the GPUs, one after another or all at once."""
    gpus = [device for device in devices if device.type == "cuda"]
    rates = []
    for together in [gpus] if at_once else [[gpu] for gpu in gpus]:
        size = staging.STAGING_BYTES
        pairs = []
        for gpu in together:
            pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            pairs.append((pinned, pinned.to(gpu)))
            torch.cuda.synchronize(gpu)
        started = time.perf_counter()
        for pinned, target in pairs * _COPIES:
            target.copy_(pinned, non_blocking=True)
        for gpu in together:
            torch.cuda.synchronize(gpu)
        seconds = time.perf_counter() - started
        rates += [round(_COPIES * size / seconds / 1e9, 2) for _ in together]
    return rates


def _forget(file: Path) -> None:
    """Drops a file from the page cache. Unwritten pages stay, so the file is synced first."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
