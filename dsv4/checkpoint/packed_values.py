"""Packed weights as JSON and memory: what a packing made, without its bytes, and made again around
them.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from dsv4.checkpoint.problems import printable
from dsv4.checkpoint.shard import DTYPE_NAMES, TORCH_DTYPES
from dsv4.errors import UserError
from dsv4.ops.linear import RowList
from dsv4.ops.linear.decode_plan import ProductShape
from dsv4.ops.linear.row_list import FormatRows, ListLaunch, PackedRows
from dsv4.ops.moe import ExpertWeights
from dsv4.ops.moe.native import NativeExperts
from dsv4.ops.quantize_activations import ActivationFormat
from dsv4.ops.quantize_activations.emulated import EmulatedWeight
from dsv4.ops.trees import is_named_tuple
from dsv4.weights.native import NativeGateUp, NativeWeight
from dsv4.weights.packed import PackedWeight
from dsv4.weights.packed_native import PackedWithNative
from dsv4.weights.quant import QuantFormat, QuantTensor, Weight

# Everything that the packings of the op tables make of weights: nothing else is made from a file.
_CLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        PackedWeight,
        PackedWithNative,
        NativeWeight,
        NativeGateUp,
        QuantTensor,
        EmulatedWeight,
        ExpertWeights,
        NativeExperts,
        RowList,
        PackedRows,
        FormatRows,
        ListLaunch,
        ProductShape,
    )
}
# Of their fields.
_TYPES = {name: get_type_hints(kind) for name, kind in _CLASSES.items()}
_WEIGHTS = (PackedWeight, NativeWeight, QuantTensor, EmulatedWeight)
_ENUMS: dict[str, Any] = {kind.__name__: kind for kind in (QuantFormat, ActivationFormat)}


def field_names(kind: Any) -> list[str]:
    """The fields of a dataclass or NamedTuple."""
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind._fields)


def known_classes() -> dict[str, list[str]]:
    """The classes of packed weights and their fields: a file of others cannot be read."""
    return {name: field_names(kind) for name, kind in _CLASSES.items()}


class Memory:
    """Memory that tensors share, each a number in the order in which it was met."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def number_of(self, tensor: Tensor) -> int:
        """The number of the memory that ``tensor`` views, which is in ``tensors`` as uint8
        ``[bytes]``.
        """
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._numbers:
            self._numbers[storage.data_ptr()] = len(self.tensors)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self.tensors.append(whole.set_(storage))
        return self._numbers[storage.data_ptr()]


def described(value: object, memory: Memory) -> Any:
    """``value`` as JSON; its tensors are views of numbers of ``memory``. Raises ``TypeError`` for
    what no packing makes.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Tensor):
        where = [memory.number_of(value), DTYPE_NAMES[value.dtype]]
        return {"view": [*where, list(value.shape), list(value.stride()), value.storage_offset()]}
    if isinstance(value, torch.dtype):
        return {"dtype": DTYPE_NAMES[value]}
    name = type(value).__name__
    if isinstance(value, Enum) and name in _ENUMS:
        return {"enum": [name, value.value]}
    if isinstance(value, tuple) and not is_named_tuple(value):
        return {"tuple": [described(part, memory) for part in value]}
    if name not in _CLASSES:
        raise TypeError(f"packed weight: found {name}, expected one of {', '.join(_CLASSES)}")
    names = field_names(type(value))
    return {"class": [name, {part: described(getattr(value, part), memory) for part in names}]}


def remade_weight(described: Any, memory: Sequence[Tensor]) -> Any:
    """``remade`` of the whole that a packing made. Raises ``TypeError`` for anything else."""
    value = remade(described, memory)
    if not _is_of(value, Weight | RowList | ExpertWeights):
        raise TypeError(f"no weight is {type(value).__name__}")
    return value


def remade(described: Any, memory: Sequence[Tensor]) -> Any:
    """The value again, around ``memory``, uint8 ``[bytes]`` by number, on any device; ``described``
    is what the function of this name wrote, with the same ``known_classes``. Raises ``TypeError``
    for a field whose type says something else, which would be noticed by an op at the earliest.
    """
    if not isinstance(described, dict):
        return described
    ((kind, value),) = described.items()
    if kind == "view":
        number, dtype, shape, stride, offset = value
        return memory[number].view(TORCH_DTYPES[dtype]).as_strided(shape, stride, offset)
    if kind == "dtype":
        return TORCH_DTYPES[value]
    if kind == "tuple":
        return tuple(remade(part, memory) for part in value)
    name, parts = value
    if kind == "enum":
        return _ENUMS[name](parts)
    values = {field: remade(part, memory) for field, part in parts.items()}
    made = _CLASSES[name](**values)
    for field, annotation in _TYPES[name].items():
        if not _is_of(values[field], annotation):
            raise TypeError(f"{name}.{field} is {type(values[field]).__name__}")
    return made


def _is_of(value: object, annotation: Any) -> bool:
    """Whether ``value`` has the type of a field."""
    if isinstance(annotation, UnionType):
        return any(_is_of(value, one) for one in get_args(annotation))
    if get_origin(annotation) is tuple:
        part_type, _ = get_args(annotation)
        return type(value) is tuple and all(_is_of(part, part_type) for part in value)
    if annotation is Weight or isinstance(annotation, TypeVar):
        return isinstance(value, _WEIGHTS)
    return isinstance(value, annotation)


def check_numbers(checksums: int, *found: Iterable[str], entry: Path) -> None:
    """Every memory has a checksum, and bytes and views, which ``found`` has by name."""
    expected = {str(number) for number in range(checksums)}
    for names in found:
        if wrong := sorted(expected.symmetric_difference(names)):
            what = "no" if wrong[0] in expected else "an unexpected"
            raise UserError(f"{entry}: damaged: found {what} tensor {printable(wrong[0])}")


@contextmanager
def naming_damage(manifest: Path) -> Iterator[None]:
    """A description of which nothing can be made as ``UserError``: it may be any JSON, and whatever
    meets something else than it was made for says so in a way of its own.
    """
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        found = f"found {type(error).__name__} ({error})"
        raise UserError(f"{manifest}: damaged: {found}, expected packed weights") from None


def numbers_in(described: Any) -> Iterator[int]:
    """The numbers of the memory that a value views, some more than once."""
    if isinstance(described, dict):
        for kind, part in described.items():
            if kind == "view":
                yield operator.index(part[0])
            else:
                yield from numbers_in(part)
    elif isinstance(described, list):
        for part in described:
            yield from numbers_in(part)
