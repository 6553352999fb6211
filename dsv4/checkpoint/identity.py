"""Which checkpoint it is: a digest that does not depend on the folder's name."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.shard import map_tensor
from dsv4.errors import UserError
from dsv4.integers import ceil_div

_SAMPLED_TENSORS = 256
_FEWEST_GAPS = 31
_WIDEST_GAP = 1 << 28
_SAMPLED_BYTES = 4096


class Identity(NamedTuple):
    """Of the weights of an engine, ``checkpoint_identity`` of the checkpoint and of the folder that
    holds the draft module; "" for weights that come from no folder.
    """

    main: str = ""
    draft: str = ""


NO_FOLDER = Identity()


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """SHA-256, in hex, of the configuration, the names and sizes of the weight files, and samples.

    The samples tell a model from one that was trained on from it, whose files have the same names
    and sizes: the beginnings of up to 256 tensors that are no routed experts, and blocks of 4 KiB
    at equal distances in every file, nearly all of which lie in routed experts. What was trained as
    a whole, or a layer of it, is seen; a change that is shorter than the distance, a 31st of a file
    and at most 256 MiB, can lie between two blocks. Raises ``UserError`` for a file that cannot be
    read.
    """
    files = sorted({stored.file for stored in checkpoint.tensors.values()})
    sizes = [(file.name, file.stat().st_size) for file in files]
    facts = [checkpoint.raw_config, checkpoint.hf_quant_config, sizes]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    names = sorted(name for name in checkpoint.tensors if ".experts." not in name)
    for name in names[:: max(1, ceil_div(len(names), _SAMPLED_TENSORS))]:
        data = map_tensor(checkpoint.tensors[name]).reshape(-1).view(torch.uint8)
        digest.update(name.encode())
        digest.update(data[:_SAMPLED_BYTES].numpy().data)
    for file, (_, size) in zip(files, sizes, strict=True):
        for block in _blocks(file, size):
            digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path, size: int) -> Iterator[bytes]:
    """Blocks of a file from its beginning to its end; a small one as a whole."""
    last = max(0, size - _SAMPLED_BYTES)
    gaps = max(_FEWEST_GAPS, ceil_div(last, _WIDEST_GAP))
    try:
        with path.open("rb", buffering=0) as file:
            for offset in sorted({last * number // gaps for number in range(gaps + 1)}):
                file.seek(offset)
                yield file.read(_SAMPLED_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
