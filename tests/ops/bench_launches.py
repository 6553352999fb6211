"""The launches of the op benchmark's cases as data, for GPUs that are not there."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dsv4.bench.ops import all_cases
from dsv4.caches.rows import RowCache
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.native.random_weights import RandomWeights
from dsv4.ops.immediate import PreparedOp
from dsv4.ops.trees import tensors_in


class _OnMeta(TorchFunctionMode):
    """Makes every tensor that is meant for a GPU on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def bench_recordings(target: Target, op: str) -> dict[str, list[Recording]]:
    """What every case of an op records for ``target``, by its name."""
    found: dict[str, list[Recording]] = {}
    with pytest.MonkeyPatch.context() as patch, _OnMeta():
        # No values: what a launch is must not depend on them.
        patch.setattr(RowCache, "write", lambda *_: None)
        # A build of torch for CPUs has no generators of GPUs.
        patch.setattr(RandomWeights, "__post_init__", _without_generator)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        for case in all_cases(f"{op}: "):
            recordings: list[Recording] = []
            patch.setattr(PreparedOp, "__init__", _recorder(recordings, target))
            patch.setattr(PreparedOp, "run", lambda self, *_: self.result)
            case.make(0)()
            found[case.name] = recordings
    return found


def _without_generator(weights: RandomWeights) -> None:
    vars(weights)["_generator"] = None


def _recorder(recordings: list[Recording], target: Target) -> Any:
    """Stands for the constructor of ``PreparedOp``: records, and has no memory to run on."""

    def record(
        self: PreparedOp, op: Any, *arguments: Any, tokens: int | None = None, **named: Any
    ) -> None:
        first = next(tensors_in([list(arguments), list(named.values())]))
        recording = Recording(target, tokens or (first.shape[0] if first.dim() else 1))
        self.result = op(recording, *arguments, **named)
        for tensor in tensors_in(self.result):
            recording.keep(tensor)
        recordings.append(recording)

    return record
