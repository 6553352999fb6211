"""Small trace files for the tests."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def write(path: Path, values: dict[str, Tensor], tokens: int = 6, **metadata: Any) -> Path:
    """A trace of token ids 10, 11, ... unless ``values`` has others; metadata that is no string is
    written as JSON.
    """
    defaults = {"token_ids": torch.arange(10, 10 + tokens), "positions": torch.arange(tokens)}
    written = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in {"format": "dsv4-trace/1", "engine": "test", **metadata}.items()
    }
    save_file({**defaults, **values}, path, written)
    return path


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
