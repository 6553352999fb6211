"""Numbers of GPUs as parameters of a test, which is skipped where there are fewer."""

from typing import Any

import pytest
import torch


def gpu_counts(*counts: int) -> list[Any]:
    """For ``pytest.mark.parametrize``."""
    there = torch.cuda.device_count()
    return [
        pytest.param(count, marks=pytest.mark.skipif(there < count, reason=f"needs {count} GPUs"))
        for count in counts
    ]
