"""What packings make, as JSON and memory and back: equal, and as much shared as before."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.checkpoint.packed_values import (
    Memory,
    described,
    naming_damage,
    numbers_in,
    remade,
    remade_weight,
)
from dsv4.errors import UserError
from dsv4.ops import Packing, torch_packing
from dsv4.ops.linear.row_list import PackedRows
from dsv4.ops.native_packing import native_packing
from dsv4.ops.tables import CUDA_PACKING
from dsv4.ops.trees import tensors_in
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.weights.test_native import stored

FORMATS = [
    QuantFormat.NVFP4,
    QuantFormat.MXFP4,
    QuantFormat.FP8_BLOCK128,
    QuantFormat.BF16,
]
PACKINGS = [
    CUDA_PACKING,
    native_packing("fp8"),
    native_packing("nvfp4"),
    torch_packing("bf16"),
    torch_packing("fp8"),
    torch_packing("nvfp4"),
]


def weight(format: QuantFormat, *shape: int) -> QuantTensor:
    if format is QuantFormat.BF16:
        return QuantTensor.dense(torch.randn(shape).bfloat16())
    return stored(format, shape, disguised=True)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def packed_by(packing: Packing) -> list[object]:
    """One of everything that layers ask a packing for."""
    rows = [weight(format, 128, 256) for format in FORMATS]
    dtypes = [None, torch.float32, None, torch.float32]
    packed: list[object] = [packing.pack_rows(rows, dtypes), packing.pack_rows(rows[:1], [None])]
    for format in FORMATS:
        packed.append(packing.pack_weight(weight(format, 100, 256)))
        packed.append(packing.pack_weight(weight(format, 3, 128, 256)))
        if packing.pack_experts is not None:
            up, gate = weight(format, 3, 128, 256), weight(format, 3, 128, 256)
            packed.append(packing.pack_experts(gate, weight(format, 3, 256, 128), up))
    return packed


def classes_in(value: object) -> list[type]:
    """The class of every value, in order."""
    parts: list[object] = []
    if isinstance(value, tuple):
        parts = list(value)
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    return [type(value), *(kind for part in parts for kind in classes_in(part))]


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.name)
def test_what_is_made_again_is_what_was_packed(packing: Packing) -> None:
    for value in packed_by(packing):
        memory = Memory()
        text = json.dumps(described(value, memory))
        copies = [part.clone() for part in memory.tensors]
        again = remade(json.loads(text), copies)
        assert described(again, Memory()) == json.loads(text)
        assert classes_in(again) == classes_in(value)
        assert set(numbers_in(json.loads(text))) == set(range(len(copies)))
        pairs = list(zip(tensors_in(value), tensors_in(again), strict=True))
        assert pairs
        for old, new in pairs:
            assert (old.dtype, old.shape, old.stride()) == (new.dtype, new.shape, new.stride())
            assert as_bytes(old) == as_bytes(new)


def test_matrices_of_a_row_list_stay_parts_of_its_memory() -> None:
    weights = [weight(QuantFormat.NVFP4, 64, 256) for _ in range(3)]
    rows = CUDA_PACKING.pack_rows(weights, [None] * 3)
    memory = Memory()
    again = remade(described(rows, memory), [part.clone() for part in memory.tensors])
    assert isinstance(again, PackedRows)
    (part,) = again.launches[0].parts
    assert [one.data.data_ptr() for one in again.weights] == [
        part.data[4 * at].data_ptr() for at in range(3)
    ]


def places_in(described: Any) -> Iterator[tuple[Any, Any]]:
    """Every field of a class and every part of a tuple: what holds it, and its name or number."""
    (kind, value) = next(iter(described.items()))
    held: dict[Any, Any] = {}
    if kind == "class":
        value = value[1]
        held = value
    elif kind == "tuple":
        held = dict(enumerate(value))
    for name, part in held.items():
        yield value, name
        if isinstance(part, dict):
            yield from places_in(part)


def remake(description: Any, memory: list[torch.Tensor]) -> None:
    with naming_damage(Path("packed.json")):
        remade_weight(description, memory)


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.name)
def test_a_description_with_a_field_or_part_of_another_kind_is_damaged(packing: Packing) -> None:
    for value in packed_by(packing):
        memory = Memory()
        description = described(value, memory)
        places = list(places_in(description))
        assert len(places) > 2
        for holder, name in places:
            before = holder[name]
            for wrong in ([], 0.5):
                holder[name] = wrong
                with pytest.raises(UserError, match=r"packed.json: damaged: found \w+Error"):
                    remake(description, memory.tensors)
            holder[name] = before
        remake(description, memory.tensors)


def test_what_no_packing_makes_is_refused() -> None:
    with pytest.raises(TypeError, match="packed weight: found dict, expected one of PackedWeight"):
        described({}, Memory())
