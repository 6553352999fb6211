"""Index query, index scores and top-k compile for every architecture, without spills."""

import pytest
import torch

from dsv4.launch.items import Launch
from dsv4.launch.kernel import Kernel
from dsv4.launch.target import ARCHITECTURES
from dsv4.ops.indexer import decode, prefill
from dsv4.ops.indexer.query import index_query
from tests.ops.indexer.meta import ROPE, WIDTH, selection
from tests.ops.recorded import launches, meta
from tests.ops.sass import ASSEMBLER_IS_13_5, compile_once, count, disassemble, resources


def selecting(tokens: int, slots: int) -> list[Launch]:
    module = decode if tokens <= 8 else prefill
    return launches(module.index_select, *selection(tokens, slots), tokens=tokens)


def rotating() -> Launch:
    arguments = meta(1, 64, WIDTH), meta(1, dtype=torch.int64)
    (launch,) = launches(index_query, *arguments, meta(ROPE // 2, dtype=torch.float32), tokens=1)
    return launch


def kernel(name: str) -> Kernel:
    found = {
        "query": rotating,
        "scores": lambda: selecting(1, 2049)[0],
        "scores of many tokens": lambda: selecting(300, 2049)[0],
        "top-k": lambda: selecting(1, 2049)[1],
        "top-k of a long context": lambda: selecting(1, 262145)[1],
        "top-k of many tokens": lambda: selecting(300, 2049)[1],
    }
    return found[name]().shape.kernel


KERNELS = ("query", "scores", "top-k", "top-k of a long context", "top-k of many tokens")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_spills(name: str, architecture: str) -> None:
    found = kernel(name)
    entries = resources(compile_once(found.source, architecture, found.defines).log)
    assert found.function in entries
    for function, (registers, spilled_bytes) in entries.items():
        assert spilled_bytes == 0, f"{function}: {spilled_bytes} bytes at {registers} registers"


def test_products_of_many_tokens_stay_asynchronous() -> None:
    """128 registers for each of 512 threads: eight steps, each in flight with the others."""
    found = kernel("scores of many tokens")
    log = compile_once(found.source, "sm_90a", found.defines).log
    assert resources(log) == {found.function: (128, 0 if ASSEMBLER_IS_13_5 else 16)}
    assert "serialized" not in log
    assert count(disassemble(found.source, "sm_90a", found.defines), "HGMMA") == 8


def test_keys_of_many_tokens_are_no_read_only_loads() -> None:
    """The kernels in front write some of them while this one waits."""
    found = kernel("scores of many tokens")
    assert "CONSTANT" not in disassemble(found.source, "sm_90a", found.defines)


def test_scores_convert_a_key_once_for_all_heads() -> None:
    """One tile: 8 steps of 8 head tiles on tensor cores."""
    found = kernel("scores")
    assert count(disassemble(found.source, "sm_90a", found.defines), "HMMA.16816.F32") == 64
