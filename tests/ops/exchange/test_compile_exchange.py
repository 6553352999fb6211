"""Kernels of ranks compile for every target; words are written and read by single relaxed accesses
of the system's scope, and nothing that pushes has a fence.
"""

import re
from itertools import product

import pytest
import torch

from dsv4.launch.items import Launch
from dsv4.launch.kernel import Kernel
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.exchange import decode
from dsv4.ops.exchange.known_words import check_known, push_known
from dsv4.ops.hyper_connection import decode as hc_decode
from dsv4.ops.hyper_connection import prefill as hc_prefill
from dsv4.peers import Peers
from tests.ops.exchange.meta import (
    MOST,
    RANKS,
    experts,
    head,
    launches,
    low_rank,
    peers,
    recording,
    row_parallel,
    shared,
)
from tests.ops.hyper_connection.meta import arguments
from tests.ops.moe.meta_layer import Geometry
from tests.ops.recorded import HOPPER, meta
from tests.ops.sass import compile_once, disassemble, resources

PRODUCERS = ("decode_linear", "decode_pair", "moe_decode")
CONSUMERS = ("hc_mix", "hc_post", "sum_words", "gather_logits")
KNOWN = ("push_known", "check_known")
SHARED = ("sum_ranks", "hc_mix_many", "hc_finish")
OTHERS = ("next_step", *SHARED, *KNOWN)
WORD_STORE = "STG.E.64.STRONG.SYS"
WIDTHS = {"flash": 4096, "pro": 7168}


def recorded(name: str, ranks: int, tokens: int, width: int, architecture: str) -> Launch:
    """The launch of a kernel by one of ``ranks``, or by a lone one."""
    target = Target(HOPPER.device, architecture, 132 if architecture == "sm_90a" else 148)
    view = peers(ranks - 1, ranks, width) if ranks > 1 else None
    found = recording(MOST if name in SHARED else tokens, view, target)
    _record(name, found, view, ranks, width)
    (launch,) = (launch for launch in launches(found) if launch.signature.kernel == name)
    return launch


def _record(name: str, found: Recording, view: Peers | None, ranks: int, width: int) -> None:
    if name == "moe_decode":
        experts(found, Geometry(width, 2048 // ranks, 256))
    elif name in SHARED:
        given = arguments("hc_seam", found.tokens, 4, width)
        hc_prefill.hc_seam(found, shared(found, width), *given[1:])
    elif name == "gather_logits":
        assert view is not None
        decode.gather_logits(found, head(found, view.layout.head_rows, width))
    elif name == "next_step":
        decode.next_step(found)
    elif name == "decode_pair":
        low_rank(found, width, 8192 // ranks)
    elif name in KNOWN:
        check_known(found, push_known(found, found.tokens, width), meta(1, dtype=torch.int32))
    else:
        result = row_parallel(found, width, 8192 // ranks)
        given = arguments("hc_seam", found.tokens, 4, width)
        if name == "hc_mix":
            hc_decode.hc_seam(found, result, *given[1:])
        elif name == "hc_post":
            hc_decode.hc_post(found, result, *given[1:4])
        elif name == "sum_words":
            decode.summed(found, result)


def kernel(name: str, ranks: int, tokens: int = 1, width: int = 4096) -> Kernel:
    return recorded(name, ranks, tokens, width, "sm_90a").shape.kernel


def sass_of(name: str, ranks: int, tokens: int = 1, width: int = 4096) -> str:
    """Of this kernel alone: a source may have several."""
    found = kernel(name, ranks, tokens, width)
    text = disassemble(found.source, "sm_90a", found.defines)
    (part,) = re.findall(rf"^\.text\.{name}:\n(.*?)(?=^\.text\.|^//-+ |\Z)", text, re.M | re.S)
    return part


def opcodes(sass: str, pattern: str) -> list[str]:
    return re.findall(rf"\b({pattern})\b", sass)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", [*PRODUCERS, *CONSUMERS, *OTHERS])
def test_no_rank_spills(name: str, ranks: int) -> None:
    programs = [(one, width) for one in ("sm_90a", "sm_100a") for width in WIDTHS.values()]
    if ranks == RANKS[0]:
        # The program of sm_100a under another name (tests/ops/test_launch_limits.py).
        programs.append(("sm_103a", WIDTHS["flash"]))
    for architecture, width in programs:
        found = recorded(name, ranks, 1, width, architecture).shape.kernel
        log = compile_once(found.source, architecture, found.defines).log
        # That of a lone rank has all registers in use too (test_compile_hyper_connection).
        most = 32 if name == "hc_mix_many" else 0
        assert resources(log)[name][1] <= most, (architecture, width)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "tokens"),
    [("decode_pair", 2), *product((*PRODUCERS[::2], *CONSUMERS), (2, 4, 8))],
)
def test_kernels_of_more_tokens_compile(name: str, tokens: int) -> None:
    for ranks in (2, 8):
        found = kernel(name, ranks, tokens)
        compile_once(found.source, "sm_90a", found.defines)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", PRODUCERS)
def test_words_are_pushed_by_single_stores_without_a_fence(name: str, ranks: int) -> None:
    """As many stores as there are ranks at each place that pushes, behind the wait."""
    sass = sass_of(name, ranks)
    stores = opcodes(sass, r"STG\.E[\w.]*\.SYS")
    words = [store for store in stores if store == WORD_STORE]
    assert words
    assert len(words) % ranks == 0
    # The router tells the host of NaN.
    assert len(stores) - len(words) == (name == "moe_decode")
    assert opcodes(sass, r"MEMBAR[\w.]*\.SYS") == []
    assert opcodes(sass, r"LDG\.E[\w.]*\.SYS") == []
    before, _, _ = sass.partition("ACQBULK")
    assert opcodes(before, r"STG[\w.]*") == []


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", CONSUMERS)
def test_words_are_polled_past_the_caches(name: str, ranks: int) -> None:
    """By hc_mix before its wait already."""
    sass = sass_of(name, ranks)
    before, _, after = sass.partition("ACQBULK")
    early = opcodes(before, r"LDG\.E[\w.]*\.SYS")
    assert bool(early) == (name == "hc_mix")
    loads = early or opcodes(after, r"LDG\.E[\w.]*\.SYS")
    # One word of each rank a thread, or other words every thread.
    shared = name == "gather_logits" or (name == "hc_mix" and ranks > 2)
    assert len(loads) >= (1 if shared else ranks)
    assert set(loads) <= {"LDG.E.64.STRONG.SYS", "LDG.E.128.STRONG.SYS"}
    # Nobody who polls pushes; what is fenced is the report of a fault.
    assert WORD_STORE not in opcodes(sass, r"STG\.E[\w.]*")
    assert opcodes(sass, r"BPT\.TRAP")
    assert opcodes(sass, r"STL[\w.]*|LDL[\w.]*") == []


@pytest.mark.parametrize("name", [*PRODUCERS, *CONSUMERS])
def test_only_kernels_with_stamps_read_the_time(name: str) -> None:
    found = kernel(name, 2)
    for defines, reads in ((found.defines, False), ((*found.defines, ("STAMPS", 16384)), True)):
        sass = disassemble(found.source, "sm_90a", defines)
        assert ("SR_GLOBALTIMER" in sass) == reads


@pytest.mark.parametrize("name", [*PRODUCERS, "hc_mix", "hc_post"])
def test_a_lone_rank_has_none_of_it(name: str) -> None:
    sass = sass_of(name, 1)
    assert len(opcodes(sass, r"[\w.]*\.STRONG\.SYS")) == (name == "moe_decode")
    assert opcodes(sass, r"MEMBAR[\w.]*\.SYS") == []
    if name.startswith("hc_"):
        assert opcodes(sass, r"BPT\.TRAP") == []
