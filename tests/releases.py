"""The geometry of four published native checkpoints (model.md#releases) and their recorded tensor
lists.
"""

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

from dsv4.checkpoint import geometry_config, tiny_config
from dsv4.weights.parameters import MtpKind

DATA = Path(__file__).parent / "data"

_FLASH, _PRO = (geometry_config(name) for name in ("v4-flash", "v4-pro"))


def _with_dspark(config: dict[str, Any], targets: list[int], rank: int) -> dict[str, Any]:
    keys = {
        "block_size": 5,
        "noise_token_id": 128799,
        "target_layer_ids": targets,
        "markov_rank": rank,
    }
    ratios = [*config["compress_ratios"], 0, 0]
    return {
        **config,
        "compress_ratios": ratios,
        **{f"dspark_{key}": value for key, value in keys.items()},
    }


class Release(NamedTuple):
    """A published checkpoint: its config, speculative module and the totals of its index."""

    overrides: dict[str, Any]
    mtp: MtpKind
    tensors: int
    nbytes: int

    @property
    def raw_config(self) -> dict[str, Any]:
        return tiny_config(**self.overrides)


RELEASES = {
    "flash_apr": Release(_FLASH, "classic", 69_187, 159_609_485_896),
    "pro_apr": Release(_PRO, "classic", 145_116, 864_704_792_696),
    "flash_0731": Release(
        _with_dspark(_FLASH, [40, 41, 42], 256), "dspark", 72_317, 166_878_536_440
    ),
    "pro_0813": Release(_with_dspark(_PRO, [58, 59, 60], 512), "dspark", 149_782, 892_727_580_904),
}


def recorded_tensors(release: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name → (safetensors dtype, shape) of a published checkpoint; of the experts only the first
    and the last.
    """
    lines = gzip.decompress((DATA / f"keys_{release}.txt.gz").read_bytes()).decode().splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return {name: (dtype, tuple(json.loads(shape))) for name, dtype, shape in rows}
