"""Tensors inside the arguments and results of ops: tuples and dataclasses of tensors, weights and
numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in ``value``, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``function`` of every tensor in its place; what holds none that changes stays
    the same object.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, function) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if is_named_tuple(value) else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name) for field in fields(value)}
        mapped = {name: map_tensors(part, function) for name, part in found.items()}
        changed = {name: part for name, part in mapped.items() if part is not found[name]}
        return replace(value, **changed) if changed else value
    return value


def is_named_tuple(value: tuple[Any, ...] | list[Any]) -> bool:
    """Whether this is a NamedTuple, whose parts are separate arguments of its constructor."""
    return isinstance(value, tuple) and type(value) is not tuple
