"""Shared test configuration: GPU tests are deselected where there is no CUDA device, most cases of
sampled tests unless all are asked for; property tests are repeatable; results that take long are
kept while the tests run.
"""

import gc
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests.shared_results import FOLDER

# Imported modules and collected tests stay: looking for garbage there took a third of the time.
gc.disable()
# Between two looks afterwards: with Python's 700 the machine of tests/ptx takes a fifth more time.
OBJECTS_BETWEEN_LOOKS = 20_000

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, max_examples=50
)
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=15)
settings.load_profile("repeatable")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, which background jobs of a shell start without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run all cases of sampled tests")


def pytest_configure(config: pytest.Config) -> None:
    """The first process makes the folder; those that it starts inherit the name."""
    if FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="dsv4-tests-")
        os.environ[FOLDER] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_LOOKS)
    gc.enable()


def pytest_sessionfinish() -> None:
    """What is left ends with the process: a last search of gigabytes takes longer than a worker is
    given.
    """
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked ``gpu`` on a machine without a CUDA device, and most cases of those
    marked ``sampled``.
    """
    # Imported where it is needed: the process that only distributes tests needs no torch.
    import torch

    if not config.getoption("--exhaustive"):
        _keep(config, items, _in_sample())
    if not torch.cuda.is_available():
        _keep(config, items, lambda item: item.get_closest_marker("gpu") is None)


def _in_sample() -> Callable[[pytest.Item], bool]:
    """Of the collected cases of a sampled test the first, and every ``step``-th behind it."""
    cases: Counter[str] = Counter()

    def in_sample(item: pytest.Item) -> bool:
        sampled = item.get_closest_marker("sampled")
        test, _, _ = item.nodeid.partition("[")
        cases[test] += 1
        return sampled is None or (cases[test] - 1) % sampled.args[0] == 0

    return in_sample


def _keep(
    config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]
) -> None:
    kept = [wanted(item) for item in items]
    config.hook.pytest_deselected(
        items=[item for item, keep in zip(items, kept, strict=True) if not keep]
    )
    items[:] = [item for item, keep in zip(items, kept, strict=True) if keep]
