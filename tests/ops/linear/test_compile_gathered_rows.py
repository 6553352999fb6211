"""Both kernels of a list that ranks share compile without spills; one pushes words without a fence,
the other polls them behind its wait.
"""

import re

import pytest
import torch

from dsv4.launch.items import Launch
from dsv4.launch.kernel import Kernel
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.linear import decode
from dsv4.ops.linear.row_list import pack_rows
from dsv4.peers import InboxLayout, Peers
from dsv4.weights.quant import QuantFormat
from tests.ops.linear.meta import activations, stored
from tests.ops.linear.test_gathered_rows_launches import listed
from tests.ops.recorded import HOPPER
from tests.ops.sass import compile_once, disassemble, of_assembler_13_5, resources

NVFP4 = QuantFormat.NVFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
WORD_STORE = "STG.E.64.STRONG.SYS"


def kernels(
    ranks: int, tokens: int, format: QuantFormat = FP8, architecture: str = "sm_90a"
) -> tuple[Kernel, Kernel]:
    """Of a CSA layer of Flash: of the one that pushes and the one that gathers."""
    target = Target(HOPPER.device, architecture, 132 if architecture == "sm_90a" else 148)
    peers = Peers.planned(0, InboxLayout(ranks, 4096, 16), 512)
    recording = Recording(target, tokens, None, peers)
    compressors = [(BF16, rows) for rows in (1024, 1024, 256, 256, 64)]
    inputs = listed([(format, 1024), (format, 512), *compressors])
    coming, *_ = decode.linear_rows(recording, activations(recording, 4096), inputs)
    queries = pack_rows(
        [stored(format, 32768 // ranks, 1024), stored(format, 8192, 1024)], [None] * 2
    )
    decode.linear_rows(recording, coming, queries, torch.empty(1024, device="meta"), 1e-6)
    push, gather = recording.items
    assert isinstance(push, Launch)
    assert isinstance(gather, Launch)
    return push.shape.kernel, gather.shape.kernel


def opcodes(sass: str, pattern: str) -> list[str]:
    return re.findall(rf"\b({pattern})\b", sass)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [1, 4, 7, 8])
@pytest.mark.parametrize(
    ("ranks", "format", "architecture"),
    [(4, FP8, "sm_90a"), (8, NVFP4, "sm_90a"), (8, FP8, "sm_100a")],
)
def test_nothing_spills(ranks: int, format: QuantFormat, architecture: str, tokens: int) -> None:
    for kernel in kernels(ranks, tokens, format, architecture):
        log = compile_once(kernel.source, architecture, kernel.defines).log
        assert resources(log)["decode_linear"][1] == 0


def test_shares_are_pushed_by_single_stores_without_a_fence() -> None:
    push, _ = kernels(8, 1)
    sass = disassemble(push.source, "sm_90a", push.defines)
    words = opcodes(sass, r"STG\.E[\w.]*\.SYS")
    assert set(words) == {WORD_STORE}
    assert len(words) % 8 == 0
    assert opcodes(sass, r"MEMBAR[\w.]*\.SYS") == []
    assert opcodes(sass, r"LDG\.E[\w.]*\.SYS") == []
    before, _, _ = sass.partition("ACQBULK")
    assert opcodes(before, r"STG[\w.]*") == []


def test_words_are_polled_behind_the_wait() -> None:
    _, gather = kernels(8, 1)
    sass = disassemble(gather.source, "sm_90a", gather.defines)
    before, _, after = sass.partition("ACQBULK")
    assert opcodes(before, r"LDG\.E[\w.]*\.SYS") == []
    # Two words of x at once, and one word of what is stored.
    loads = opcodes(after, r"LDG\.E[\w.]*\.SYS")
    assert set(loads) == {"LDG.E.64.STRONG.SYS", "LDG.E.128.STRONG.SYS"}
    assert WORD_STORE not in opcodes(sass, r"STG\.E[\w.]*")
    assert opcodes(sass, r"BPT\.TRAP")


@of_assembler_13_5
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_x_of_all_tokens_is_asked_for_at_once(tokens: int) -> None:
    """Then by the clock, until all of it is there."""
    _, gather = kernels(4, tokens)
    sass = disassemble(gather.source, "sm_90a", gather.defines)
    first, *_ = sass.partition("ACQBULK")[2].split("CS2R")
    assert opcodes(first, r"LDG\.E\.128[\w.]*\.SYS") == ["LDG.E.128.STRONG.SYS"] * tokens
    assert opcodes(sass, r"LDG\.E\.128[\w.]*\.SYS") == ["LDG.E.128.STRONG.SYS"] * 2 * tokens
