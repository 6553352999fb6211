"""The ``ops`` fixture: every op test runs with every op table."""

from collections.abc import Iterator

import pytest
import torch

from dsv4.ops import Ops
from tests.ops.cases import BACKENDS


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """An op table; tensors created inside the test live on its device."""
    backend = BACKENDS[request.param]
    with torch.device(backend.device):
        yield backend.ops
