"""Ranks and their products without memory, for recordings that nothing runs."""

import torch
from torch import Tensor

from dsv4.launch.items import Launch
from dsv4.launch.recording import Recording
from dsv4.launch.target import Target
from dsv4.ops.exchange import decode, prefill
from dsv4.ops.exchange.words import WordSum
from dsv4.ops.linear import decode as linear_decode
from dsv4.ops.linear.prefill import linear as prefill_linear
from dsv4.ops.moe import decode as moe_decode
from dsv4.peers import InboxLayout, Peers
from tests.ops.moe.meta_layer import NVFP4, Geometry, step, weight
from tests.ops.recorded import HOPPER

RANKS = (2, 4, 8)
# Of the longest step.
MOST = 512
WIDTH = 4096
VOCABULARY = 129_280


def peers(rank: int, ranks: int, width: int = WIDTH, vocabulary: int = VOCABULARY) -> Peers:
    """A rank's view of the others."""
    return Peers.planned(rank, InboxLayout(ranks, width, vocabulary), MOST)


def recording(tokens: int, view: Peers | None, target: Target = HOPPER) -> Recording:
    """An empty one."""
    return Recording(target, tokens, None, view)


def row_parallel(found: Recording, width: int = WIDTH, columns: int = 2048) -> WordSum | Tensor:
    """Records a product of a decode step whose result is a part of a sum."""
    x_TK = found.empty((found.tokens, columns), torch.bfloat16)
    return decode.row_parallel_linear(found, x_TK, weight(NVFP4, width, columns))


def low_rank(found: Recording, width: int = WIDTH, columns: int = 2048) -> WordSum | Tensor:
    """The same of what two groups of 4096 columns give, for one or two tokens one launch."""
    x_T2K = found.empty((found.tokens, 2, 4096), torch.bfloat16)
    low_T2R = linear_decode.grouped_linear(found, x_T2K, weight(NVFP4, columns, 4096))
    return decode.row_parallel_linear(found, low_T2R.flatten(1), weight(NVFP4, width, columns))


def head(found: Recording, rows: int, width: int = WIDTH) -> WordSum | Tensor:
    """Records the logits of so many rows of the vocabulary."""
    hidden_TE = found.empty((found.tokens, width), torch.bfloat16)
    return decode.vocab_parallel_linear(found, hidden_TE, weight(NVFP4, rows, width))


def experts(found: Recording, geometry: Geometry) -> WordSum | Tensor:
    """Records the experts of a decode step."""
    inputs = step(found, geometry)
    router = geometry.router()
    return moe_decode.moe(found, *inputs, router, *geometry.weights(), 10.0).y_TE


def shared(found: Recording, width: int = WIDTH) -> prefill.PartialSum | Tensor:
    """Records a product of a prefill step whose result is a part of a sum."""
    x_TK = found.empty((found.tokens, 2048), torch.bfloat16)
    matrix = weight(NVFP4, width, 2048)
    return prefill.row_parallel_linear_with(prefill_linear, found, x_TK, matrix)


def launches(found: Recording) -> list[Launch]:
    """Its items, all of them launches."""
    items = [item for item in found.items if isinstance(item, Launch)]
    assert len(items) == len(found.items)
    return items
