"""Engines of the demo on a GPU that tests of decoding share."""

from collections.abc import Iterator

import pytest

from dsv4 import Engine
from tests.decode.demo import MODES, load


@pytest.fixture(scope="module")
def eager() -> Engine:
    return load()


@pytest.fixture(scope="module", params=MODES)
def graph(request: pytest.FixtureRequest) -> Engine:
    return load(cuda_graph=request.param)


@pytest.fixture
def fresh(eager: Engine) -> Iterator[Engine]:
    eager.reset()
    yield eager
    eager.reset()
