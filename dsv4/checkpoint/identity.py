"""Which checkpoint it is: a digest that does not depend on the folder's name."""

import hashlib
import json

import torch

from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.shard import map_tensor

_SAMPLED_TENSORS = 256
_SAMPLED_BYTES = 4096


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """SHA-256, in hex, of the configuration, the names and sizes of the weight files, and samples.

    The samples, the beginnings of up to 256 tensors, tell a model from one that was trained on
    from it, whose files have the same names and sizes. Routed experts are left out: where they
    alone differ, nothing else tells.
    """
    files = sorted({stored.file for stored in checkpoint.tensors.values()})
    sizes = [(file.name, file.stat().st_size) for file in files]
    facts = [checkpoint.raw_config, checkpoint.hf_quant_config, sizes]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    names = sorted(name for name in checkpoint.tensors if ".experts." not in name)
    for name in names[:: max(1, -(-len(names) // _SAMPLED_TENSORS))]:
        data = map_tensor(checkpoint.tensors[name]).reshape(-1).view(torch.uint8)
        digest.update(name.encode())
        digest.update(data[:_SAMPLED_BYTES].numpy().data)
    return digest.hexdigest()
