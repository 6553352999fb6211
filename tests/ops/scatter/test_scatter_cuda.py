"""The kernel on a GPU against the torch op."""

import pytest
import torch

from dsv4.ops.scatter import Part
from dsv4.ops.scatter.cuda import PART_BYTES, Scatter, kernel_target, table_words
from tests.ops.scatter.parts import expected, parts_of, untouched, with_table

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def queue(memory: torch.Tensor, table: int, parts: int) -> None:
    """On a stream of its own, whose end is waited for."""
    target = kernel_target(CUDA)
    assert target is not None
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    Scatter(target, memory, stream).queue(table, parts)
    stream.synchronize()


def test_every_part_gets_its_bytes_and_nothing_else_changes() -> None:
    memory, parts = parts_of(CUDA)
    queue(memory, with_table(memory, parts), len(parts))
    assert untouched(parts)
    assert all(torch.equal(part.target, expected(memory, part)) for part in parts)


@pytest.mark.parametrize(("rows", "width", "first"), [(1, 8 << 20, 0), (4096, 2048, 1024)])
def test_a_span_of_a_load_is_whole(rows: int, width: int, first: int) -> None:
    nbytes = rows * width
    memory = torch.empty(nbytes + PART_BYTES, dtype=torch.uint8, device=CUDA)
    memory[:nbytes] = torch.randint(256, (nbytes,), device=CUDA, dtype=torch.uint8)
    target = torch.zeros(rows * (width - first), dtype=torch.uint8, device=CUDA)
    part = Part(0, nbytes, target, width, first, width) if first else Part(0, nbytes, target)
    memory[nbytes:] = torch.tensor(table_words([part])).view(torch.uint8).to(CUDA)
    queue(memory, nbytes, 1)
    assert torch.equal(target, expected(memory, part))
