"""Results that the processes of a test run share: one of them computes, the others read a file."""

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

FOLDER = "DSV4_TEST_RESULTS"
"""Names the folder of a run; its first process makes it (tests/conftest.py)."""
T = TypeVar("T")


def shared(key: Any, compute: Callable[[], T]) -> T:
    """``compute()``, once in a test run.

    The ``repr`` of ``key`` says everything that the result depends on and that changes within a
    run.
    """
    # Imported where it is needed: the process that only distributes tests needs no torch.
    from dsv4.launch.compiler import keep_file

    path = Path(os.environ[FOLDER]) / hashlib.sha256(repr(key).encode()).hexdigest()
    if path.exists():
        return pickle.loads(path.read_bytes())
    result = compute()
    keep_file(path, pickle.dumps(result))
    return result
