"""The kernel by its table, executed on the CPU; the table itself."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.scatter import Part
from dsv4.ops.scatter.cuda import PART_BYTES, SHAPE, table_words
from tests.ops.scatter.parts import expected, parts_of, untouched, with_table
from tests.ptx.faults import Misaligned
from tests.ptx.nvrtc import SourceEdit, run_recorded

FAULTS = {
    "a batch of parts is left out": SourceEdit("scatter.cu", "first < parts;", "first < BATCH;"),
    "a target's alignment is not looked at": SourceEdit(
        "scatter.cu", "address | reinterpret_cast<int64>(part.target)", "address"
    ),
    "rows follow one another in the memory": SourceEdit("scatter.cu", "row * part.width", "0"),
}


def run(edit: SourceEdit | None = None) -> tuple[torch.Tensor, list[Part]]:
    """Memory and parts behind the kernel."""
    memory, parts = parts_of(torch.device("cpu"))
    table = with_table(memory, parts)
    recording = Recording(Target(torch.device("cpu"), "sm_90a", 132), 1)
    words = memory[table:].view(torch.int64)
    # Few blocks: all of them look at every part.
    shape = replace(SHAPE, blocks=2, threads=64)
    recording.launch(shape, memory=memory, table=words, parts=len(parts))
    (launch,) = recording.items
    assert isinstance(launch, Launch)
    run_recorded(launch, "sm_90a", {"memory": memory, "table": words}, 1, edit=edit)
    return memory, parts


def is_right(memory: torch.Tensor, parts: list[Part]) -> bool:
    return untouched(parts) and all(
        torch.equal(part.target, expected(memory, part)) for part in parts
    )


def test_every_part_gets_its_bytes_and_nothing_else_changes() -> None:
    assert is_right(*run())


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    with suppress(Misaligned):
        assert not is_right(*run(FAULTS[fault]))


def test_the_table_has_whole_parts_and_columns() -> None:
    target = torch.empty(30, dtype=torch.uint8)
    parts = [Part(3, 33, target), Part(40, 90, target, 10, 2, 8)]
    address = target.data_ptr()
    assert table_words(parts) == [3, address, 30, 1, 0, 42, address, 6, 5, 10]
    assert len(table_words(parts)) * 8 == 2 * PART_BYTES
