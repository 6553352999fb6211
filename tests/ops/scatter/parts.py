"""Parts of a piece of memory of every alignment, whole ones and columns of rows."""

import torch
from torch import Tensor

from dsv4.ops.scatter import Part
from dsv4.ops.scatter.cuda import PART_BYTES, table_words

# Bytes in front of and behind a target, which nothing may touch.
_GUARD = 16
_UNTOUCHED = 0xEE
NBYTES = 6000
# First byte, bytes, and how far the target is from an address that 16 divides.
WHOLE = [(0, 1600, 0), (1600, 800, 8), (2400, 12, 4), (2412, 1, 0), (2413, 387, 3), (2800, 64, 1)]
# First byte, rows, width, columns, the target as above.
COLUMNS = [(3200, 10, 64, (16, 48), 0), (3840, 33, 24, (8, 16), 8), (4632, 7, 5, (1, 4), 2)]
# More than the kernel looks at together.
SMALL = [(4700 + 4 * at, 4, 4) for at in range(150)]
TARGETS = [
    *((nbytes, shift) for _, nbytes, shift in (*WHOLE, *SMALL)),
    *((rows * (stop - first), shift) for _, rows, _, (first, stop), shift in COLUMNS),
]


def parts_of(device: torch.device) -> tuple[Tensor, list[Part]]:
    """Memory uint8 ``[NBYTES]`` of random bytes, behind it room for the table of the parts, and
    these parts of it, whose targets are guarded.
    """
    count = len(TARGETS)
    sizes = [-(-(2 * _GUARD + nbytes + shift) // 16) * 16 for nbytes, shift in TARGETS]
    # In one storage: the machine that runs kernels on a CPU knows no other memory.
    whole = torch.full(
        (NBYTES + PART_BYTES * count + sum(sizes) + 16,), _UNTOUCHED, dtype=torch.uint8
    ).to(device)
    whole = whole[-whole.data_ptr() % 16 :]
    memory = whole[: NBYTES + PART_BYTES * count]
    generator = torch.Generator().manual_seed(1)
    memory[:NBYTES] = torch.randint(256, (NBYTES,), generator=generator, dtype=torch.uint8)
    targets = []
    at = memory.numel()
    for (nbytes, shift), size in zip(TARGETS, sizes, strict=True):
        start = at + _GUARD + shift
        targets.append(whole[start : start + nbytes])
        at += size
    places = iter(targets)
    parts = [Part(start, start + nbytes, next(places)) for start, nbytes, _ in (*WHOLE, *SMALL)]
    parts += [
        Part(start, start + rows * width, next(places), width, *columns)
        for start, rows, width, columns, _ in COLUMNS
    ]
    return memory, parts


def with_table(memory: Tensor, parts: list[Part]) -> int:
    """Writes the table of the parts behind the bytes; where it begins."""
    words = torch.tensor(table_words(parts), dtype=torch.int64)
    memory[NBYTES : NBYTES + PART_BYTES * len(parts)] = words.view(torch.uint8).to(memory.device)
    return NBYTES


def expected(memory: Tensor, part: Part) -> Tensor:
    """The bytes of a part, uint8."""
    found = memory[part.start : part.stop]
    if part.width:
        found = found.view(-1, part.width)[:, part.first : part.end].reshape(-1)
    return found


def untouched(parts: list[Part]) -> bool:
    """Whether all bytes between the targets are as they were."""
    storage = parts[0].target.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=parts[0].target.device)
    whole = whole.set_(storage).clone()
    for part in parts:
        first = part.target.data_ptr() - storage.data_ptr()
        whole[first : first + part.target.numel()] = _UNTOUCHED
    behind = parts[0].target.data_ptr() - storage.data_ptr() - _GUARD
    return bool((whole[behind:] == _UNTOUCHED).all())
