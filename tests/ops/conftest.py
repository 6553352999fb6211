"""The ``ops`` fixture: every op test runs with every op table that this machine can run.

Compiling every kernel for every architecture takes minutes, so those tests are left out of ``make
check``.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.cases import BACKENDS, OpsUnderTest

# What the CUDA ops refuse by design: activations and weights that are not 16 bit.
NOT_16_BIT = re.compile(r"found torch\.float32.*, expected torch\.bfloat16|F32 weight")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name.startswith(
            "test_compile_"
        ):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of an op table; tensors created inside the test live on its device."""
    device = BACKENDS[request.param].device
    # The CPU is the default; saying so would cost every call of torch some microseconds.
    with nullcontext() if device == "cpu" else torch.device(device):
        yield request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, backend: str) -> torch.dtype:
    """The dtype of activations and plain rows, of those that the op table takes."""
    if backend == "cuda" and request.param == torch.float32:
        pytest.skip("the CUDA ops compute in bfloat16")
    return request.param


@pytest.fixture
def ops(backend: str) -> OpsUnderTest:
    """An op table."""
    table = BACKENDS[backend].ops
    if backend == "torch":
        return table
    names = [field.name for field in fields(OpsUnderTest)]
    return replace(table, **{name: skipping_float32(getattr(table, name)) for name in names})


def skipping_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op``, which skips the test when it refuses float32 activations; other errors fail it."""

    @wraps(op)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return op(*arguments, **named)
        except ValueError as error:
            if NOT_16_BIT.search(str(error)):
                pytest.skip(f"the CUDA ops compute in bfloat16: {error}")
            raise

    return call
