"""A recording that the CPU executes: launches by the machine of ``tests.ptx``, calls by torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.launch.boxes import Boxes
from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Call, Launch
from dsv4.launch.recording import Recording
from dsv4.launch.signature import SHARED_HEADERS, source_path
from tests.ptx.nvrtc import SourceEdit, run_recorded
from tests.ptx.schedule import SCHEDULES, Schedule

_POISON = 0xFF


def execute(
    recording: Recording,
    tokens: int,
    edit: SourceEdit | None = None,
    schedule: Schedule = SCHEDULES["random"],
) -> Callable[[Tensor], Tensor]:
    """Runs every item; returns what gives a buffer of the recording, or a view of one, its memory.
    ``edit`` plants a fault in the kernels beside the file that it names.

    Where nothing has written, floats are NaN and integers -1; counters are zeros, and are asserted
    to be that again.
    """
    memory: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        found = memory.get(storage_key(tensor))
        if found is None:
            nbytes = tensor.untyped_storage().nbytes()
            found = torch.full((nbytes,), _POISON, dtype=torch.uint8)
            memory[storage_key(tensor)] = found
        return found.view(tensor.dtype).as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )

    counters = [real(tensor).zero_() for tensor in recording.zeroed_tensors]
    edited = False
    for item in recording.items:
        if isinstance(item, Call):
            item.function(tokens, *map(real, item.tensors))
            continue
        shape = item.shape_for(tokens, dense=False)
        if shape is None:
            continue
        tensors = {
            name: value.tensor if isinstance(value, Boxes) else value
            for name, value in item.arguments.items()
        }
        given = {
            name: real(value)
            for name, value in tensors.items()
            if isinstance(value, Tensor) and value.is_meta
        }
        architecture = recording.target.architecture
        planted = edit if edit is not None and _has(item, edit) else None
        edited |= planted is not None
        # Blocks that share a tile wait for each other.
        resident = shape.numbers.get("splits", 1) > 1
        run_recorded(item, architecture, given, tokens, schedule, resident, planted)
    if edited != (edit is not None):
        raise LookupError(f"{edit}: no kernel has it")
    assert not any(counter.any() for counter in counters), "counters are left as they were"
    return real


def _has(item: Launch, edit: SourceEdit) -> bool:
    folder = source_path(item.shape.kernel.source).parent
    return any((place / edit.file).exists() for place in (folder, SHARED_HEADERS))
