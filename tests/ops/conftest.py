"""The ``ops`` fixture: every op test runs with every op table that this machine can run."""

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import wraps
from typing import Any

import pytest
import torch

from dsv4.ops import Ops
from tests.ops.cases import BACKENDS

# What the CUDA ops refuse by design: activations and weights that are not 16 bit.
NOT_16_BIT = re.compile(r"found torch\.float32.*, expected torch\.bfloat16|F32 weight")


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """An op table; tensors created inside the test live on its device."""
    backend = BACKENDS[request.param]
    table = backend.ops if request.param == "torch" else skipping_float32(backend.ops)
    with torch.device(backend.device):
        yield table


def skipping_float32(table: Ops) -> Ops:
    """A table that skips the test when an op refuses float32 activations; any other error fails it."""
    return replace(table, **{field.name: _skipping(getattr(table, field.name)) for field in fields(Ops)})


def _skipping(op: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(op)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return op(*arguments, **named)
        except ValueError as error:
            if NOT_16_BIT.search(str(error)):
                pytest.skip(f"the CUDA ops compute in bfloat16: {error}")
            raise

    return call
