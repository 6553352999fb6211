"""Shared test configuration: GPU tests are deselected where there is no CUDA device; property tests
are repeatable; results that take long are kept while the tests run.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator

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
    """Deselect the tests marked ``gpu`` on a machine without a CUDA device."""
    # Imported where it is needed: the process that only distributes tests needs no torch.
    import torch

    if torch.cuda.is_available():
        return
    gpu_items = [item for item in items if item.get_closest_marker("gpu") is not None]
    if gpu_items:
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
