"""Kernels at their real sizes at the end of 2^20 tokens, against the torch ops: whole chunks, whose
scores take several tiles, and lists that reach into the last entries.
"""

import pytest
import torch

from dsv4.caches.rows import RowFormat
from dsv4.ops import indexer as indexer_reference
from tests.ops.attention import decode_cases, prefill_cases
from tests.ops.compressor import test_compressor_cuda as compressor
from tests.ops.indexer import test_indexer_cuda as indexer

pytestmark = pytest.mark.gpu

CONTEXT = 1 << 20
ENTRIES = CONTEXT // 4
FORMATS = [RowFormat.KV_FP8, RowFormat.PLAIN]


@pytest.mark.parametrize("chunk", [2048, 4096])
def test_a_chunk_selects_like_torch_in_every_tile(chunk: int) -> None:
    """Tiles have 255 tokens; the torch op is asked for those at their ends."""
    with torch.device("cuda"):
        q_TID, weight_TI, keys = indexer.exact_case(ENTRIES + 1, chunk, RowFormat.INDEX_FP8)
        position_T = torch.arange(CONTEXT - chunk, CONTEXT)
        found_TK = indexer.index_select(q_TID, weight_TI, 0.5, keys, position_T, 512)
        ends = [t for start in range(0, chunk, 255) for t in (start, start + 254) if t < chunk]
        some = torch.tensor([*ends, chunk - 1])
        few = q_TID[some], weight_TI[some]
        expected_TK = indexer_reference.index_select(*few, 0.5, keys, position_T[some], 512)
        assert torch.equal(found_TK[some], indexer.ascending(expected_TK))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize(("heads", "listed"), [(64, 512), (128, 1024)], ids=["flash", "pro"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_decode_attention_over_entries_of_the_whole_context(
    format: RowFormat, heads: int, listed: int, tokens: int
) -> None:
    start = CONTEXT - tokens
    keys = decode_cases.random_keys(decode_cases.CSA, format, entries=ENTRIES + 1)
    selected_TK = decode_cases.selection(tokens, start, listed, ENTRIES)
    last_T = (start + torch.arange(tokens, device="cuda") + 1) // decode_cases.CSA - 1
    selected_TK[:, -1] = last_T
    q_THD = decode_cases.normal(tokens, heads, decode_cases.HEAD_DIM, seed=5).bfloat16()
    decode_cases.check(q_THD, keys, selected_TK, start)


@pytest.mark.parametrize("kernel", prefill_cases.LAUNCHERS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
@pytest.mark.parametrize("ratio", [4, 128])
def test_prefill_attention_over_entries_of_the_whole_context(
    ratio: int, format: RowFormat, kernel: str
) -> None:
    rows = prefill_cases.Rows(format)
    listed = 512 if ratio == 4 else 0
    prefill_cases.check(prefill_cases.make_case(70, 64, ratio, listed, CONTEXT - 70, rows), kernel)


@pytest.mark.parametrize("name", ["csa", "index", "hca"])
@pytest.mark.parametrize("tokens", [9, 300, 4096])
def test_a_chunk_fills_the_last_entries(name: str, tokens: int) -> None:
    with torch.device("cuda"):
        entries = CONTEXT // compressor.SHAPES[name][0] + 1
        compressor.both(name, CONTEXT - tokens, tokens, compressor.state_for(name, entries))
