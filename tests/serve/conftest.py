"""One server for all tests that only ask it something."""

from collections.abc import Iterator

import pytest

from tests.serve.running import Running, load_demo, running


@pytest.fixture(scope="session")
def demo() -> Iterator[Running]:
    """A server of the demo with places for two requests in its queue."""
    with running(load_demo("--queue", "2", "--max-body", "1")) as one:
        yield one
