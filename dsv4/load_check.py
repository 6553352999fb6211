"""The last check of native kernels: every class of products of a model, on the model's own weights,
against the portable kernels.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.layers.attention import Attention
from dsv4.layers.moe import MoE
from dsv4.model import Transformer
from dsv4.native.difference import MIXTURE, PRODUCT, REQUANTISED, difference, mixture_difference
from dsv4.ops import Ops
from dsv4.ops.immediate import ops_of
from dsv4.ops.moe import ExpertWeights
from dsv4.ops.moe.native import NativeExperts
from dsv4.ops.tables import RecordedTable, Table
from dsv4.weights.packed import PackedWeight
from dsv4.weights.packed_native import PackedWithNative
from dsv4.weights.quant import QuantFormat, Weight, WeightParts

# More than two tiles of 128 tokens and more than a pair of them, the last one not full.
TOKENS = 300
# Token ids are multiples of this prime, so that they are spread over the vocabulary.
_TOKEN_STRIDE = 7919

AnyResult = TypeVar("AnyResult")

_LOG = logging.getLogger("dsv4")


class Product(NamedTuple):
    """One use of an op with a model's weights. ``kind``: uses of equal kinds run the same kernels.

    ``compare(native, reference, exact)``: what is wrong with the first, None if nothing is.
    ``exact``: neither rounds rows to codes.
    """

    name: str
    kind: Hashable
    compare: Callable[[Ops, Ops, bool], str | None]


def checked_table(table: Table, model: Transformer, engine: EngineConfig) -> Table:
    """``table``, or the portable one behind it where its kernels compute something else on the
    weights of ``model``: then, and where native kernels were refused before, one warning says so.

    Raises ``UserError`` instead of the first where ``engine`` requires native kernels.
    """
    refused = table.refused
    if table.portable is not None:
        refused = first_difference(table, table.portable, model)
        if refused is None:
            return table
        if engine.require_native:
            raise UserError(f"EngineConfig.require_native: {refused}")
        table = table.portable
    if refused is not None:
        recorded = isinstance(table, RecordedTable)
        rounding = recorded and engine.prefill_activations != "bf16"
        kept = ", with 16-bit activations" if rounding else ""
        _LOG.warning("no native kernels, the portable ones are used%s: %s", kept, refused)
    return table


@torch.inference_mode()
def first_difference(native: Table, portable: Table, model: Transformer) -> str | None:
    """What the native kernels compute wrong on the model's weights, in one line; None if all is
    right.
    """
    native_ops = ops_of(native)
    reference_ops = ops_of(native.reference or portable)
    exact = native.reference is None
    seen = set()
    for product in products(model):
        if product.kind in seen:
            continue
        seen.add(product.kind)
        wrong = product.compare(native_ops, reference_ops, exact)
        if wrong is not None:
            return f"{product.name} on the model's weights: {wrong}"
    return None


def products(model: Transformer) -> Iterator[Product]:
    """Every use of a matrix in a prefill step, in order."""
    dtype = model.embed.compute_dtype
    vocabulary = model.embed.table_VE.shape[0]
    for segment in model.segments:
        for block in segment.blocks:
            inputs = _Inputs(segment.device, dtype)
            yield from _attention_products(block.attn, inputs)
            yield _experts(block.ffn, inputs, vocabulary)
    lm_head = model.head.lm_head
    yield _product(
        "linear",
        [lm_head],
        _Inputs(model.head_device, dtype),
        (lm_head.shape[-1],),
        lambda ops, x: [ops.linear(x, lm_head, torch.float32)],
    )


class _Inputs(NamedTuple):
    """Random rows on a device, the same each time."""

    device: torch.device
    dtype: torch.dtype

    def rows(self, *shape: int) -> Tensor:
        """Values ``[TOKENS, *shape]`` of standard deviation 1."""
        generator = torch.Generator(self.device).manual_seed(0)
        size = (TOKENS, *shape)
        values = torch.randn(size, generator=generator, dtype=torch.float32, device=self.device)
        return values.to(self.dtype)


def _attention_products(attn: Attention, inputs: _Inputs) -> Iterator[Product]:
    input_rows = attn.input_rows
    query_rows = attn.query_rows
    groups = attn.config.o_groups
    eps = attn.config.rms_norm_eps
    yield _product(
        "linear_rows",
        input_rows.weights,
        inputs,
        (input_rows.weights[0].shape[-1],),
        lambda ops, x: ops.linear_rows(x, input_rows),
    )
    yield _product(
        "linear_rows",
        query_rows.weights,
        inputs,
        (query_rows.weights[0].shape[-1],),
        lambda ops, x: ops.linear_rows(x, query_rows, attn.q_norm, eps),
        normed=True,
    )
    yield _product(
        "grouped_linear",
        [attn.wo_a],
        inputs,
        (groups, attn.wo_a.shape[-1]),
        lambda ops, x: [ops.grouped_linear(x, attn.wo_a)],
    )
    yield _product(
        "linear",
        [attn.wo_b],
        inputs,
        (attn.wo_b.shape[-1],),
        lambda ops, x: [ops.linear(x, attn.wo_b)],
    )


def _product(
    op: str,
    weights: Sequence[Weight],
    inputs: _Inputs,
    shape: tuple[int, ...],
    run: Callable[[Ops, Tensor], Sequence[Tensor]],
    normed: bool = False,
) -> Product:
    def compare(native: Ops, reference: Ops, exact: bool) -> str | None:
        x = inputs.rows(*shape)
        found, fault = _attempt(inputs.device, lambda: run(native, x))
        if found is None:
            return fault
        tolerance = PRODUCT if exact or not normed else REQUANTISED
        for one, expected in zip(found, run(reference, x), strict=True):
            wrong = difference(one, expected, tolerance)
            if wrong is not None:
                return wrong
        return None

    return Product(f"{op} {_described(weights)}", (op, _kind(weights)), compare)


def _experts(ffn: MoE, inputs: _Inputs, vocabulary: int) -> Product:
    weights = [
        *(ffn.router.gate, ffn.experts.w1, ffn.experts.w2, ffn.experts.w3),
        *(ffn.shared.w1, ffn.shared.w2, ffn.shared.w3),
    ]

    def compare(native: Ops, reference: Ops, exact: bool) -> str | None:
        x_TE = inputs.rows(ffn.shared.w1.shape[-1])
        tokens_T = torch.arange(TOKENS, device=inputs.device) * _TOKEN_STRIDE % vocabulary
        found, fault = _attempt(inputs.device, lambda: ffn(native, x_TE, tokens_T))
        if found is None:
            return fault
        expected = ffn(reference, x_TE, tokens_T)
        return mixture_difference(found, expected, MIXTURE if exact else REQUANTISED)

    copies = (_copy_of(ffn.experts), _copy_of(ffn.shared))
    kind = ("moe", ffn.router.hashed, copies, _kind(weights))
    return Product(f"moe {_described(weights[1:2])}", kind, compare)


def _attempt(
    device: torch.device, run: Callable[[], AnyResult]
) -> tuple[AnyResult | None, str | None]:
    """The result, or the error of the device in one line."""
    try:
        found = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        return None, " ".join(str(error).split("\n")[0].split())
    return found, None


def _kind(weights: Sequence[Weight]) -> Hashable:
    return tuple((_format(weight), weight.shape, _form(weight)) for weight in weights)


def _form(weight: Weight) -> Hashable:
    """What kernels choose by, besides format and shape."""
    if not isinstance(weight, PackedWeight):
        return None
    native = weight.native if isinstance(weight, PackedWithNative) else None
    return weight.power_of_two_scales, None if native is None else native.format


def _copy_of(experts: ExpertWeights) -> QuantFormat | None:
    """The format of the native copy of w1 and w3."""
    gate_up = experts.gate_up if isinstance(experts, NativeExperts) else None
    return None if gate_up is None else gate_up.format


def _described(weights: Sequence[Weight]) -> str:
    return ", ".join(f"{_format(weight)} {list(weight.shape)}" for weight in weights)


def _format(weight: Weight) -> str:
    return weight.format.value if isinstance(weight, WeightParts) else type(weight).__name__
