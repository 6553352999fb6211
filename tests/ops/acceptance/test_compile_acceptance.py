"""The kernel of acceptance compiles for every target; no GPU needed."""

from dsv4.launch.target import ARCHITECTURES
from tests.ops.acceptance.test_acceptance_launches import record
from tests.ops.sass import compile_once, resources


def test_compiles_with_few_spills() -> None:
    """A block of 1,024 threads has 64 registers a thread; top-p alone uses them all."""
    (launch,) = record(5, 129_280)
    for architecture in ARCHITECTURES:
        log = compile_once("acceptance/acceptance", architecture, launch.shape.kernel.defines).log
        found = resources(log)
        assert list(found) == ["judge_drafts"]
        assert max(spill for _, spill in found.values()) <= 256, architecture
