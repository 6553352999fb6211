"""Starts of a checkpoint with packed weights on disk."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsv4 import Engine, EngineConfig
from dsv4.checkpoint import packed_cache
from dsv4.ops.tables import DirectTable, Table

PROMPT = [3, 1, 4, 1, 5]


class Starts:
    """Starts of one checkpoint with one cache, and how many weights each packs."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.cache = cache

    def __call__(self, **settings: Any) -> tuple[int, torch.Tensor]:
        packed = 0

        def counting(table: Table) -> Table:
            assert isinstance(table, DirectTable)

            def count(pack: Callable[..., Any]) -> Callable[..., Any]:
                def counted(*arguments: Any) -> Any:
                    nonlocal packed
                    packed += 1
                    return pack(*arguments)

                return counted

            found = table.packing
            packing = replace(
                found, pack_weight=count(found.pack_weight), pack_rows=count(found.pack_rows)
            )
            return replace(table, packing=packing)

        config = EngineConfig(
            device="cpu", ops="torch", max_context=32, packed_cache=str(self.cache), **settings
        )
        engine = Engine.load(self.folder, config, change_table=counting)
        return packed, engine.prefill(PROMPT)

    @property
    def entries(self) -> list[Path]:
        """What lies in the cache, but for locks."""
        return sorted(path for path in self.cache.iterdir() if path.suffix != ".lock")


def change_body(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """What a manifest says of the tensors, with the SHA-256 that goes with it."""
    manifest = json.loads(file.read_text())
    change(manifest["packed"])
    manifest["sha256"] = packed_cache._digest(manifest["packed"])
    file.write_text(json.dumps(manifest))
