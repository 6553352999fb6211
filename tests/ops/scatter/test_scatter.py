"""scatter: every part where it belongs, whole or by columns, and nothing else."""

import torch

from dsv4.ops.scatter import scatter
from tests.ops.scatter.parts import expected, parts_of


def test_every_part_gets_its_bytes() -> None:
    memory, parts = parts_of(torch.device("cpu"))
    scatter(memory, parts)
    for part in parts:
        assert torch.equal(part.target, expected(memory, part)), part[:2]


def test_nothing_to_put_is_no_error() -> None:
    scatter(torch.zeros(4, dtype=torch.uint8), [])
