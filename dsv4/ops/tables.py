"""Op tables: torch ops run when they are called; CUDA ops are recorded, once for a step
(``dsv4.launch``).

The choice between decode and prefill forms, and between kernel libraries, is made here and nowhere
else.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from dsv4.engine_config import ACTIVATION_MODES, ActivationMode
from dsv4.errors import UserError
from dsv4.launch.recording import Recording
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.ops import TORCH, TORCH_PACKING, Ops, Packing, torch_packing
from dsv4.ops.attention import decode as attention_decode
from dsv4.ops.attention import prefill as attention_prefill
from dsv4.ops.exchange import decode as exchange_decode
from dsv4.ops.exchange import prefill as exchange_prefill
from dsv4.ops.hyper_connection import decode as hc_decode
from dsv4.ops.hyper_connection import prefill as hc_prefill
from dsv4.ops.indexer import decode as indexer_decode
from dsv4.ops.indexer import prefill as indexer_prefill
from dsv4.ops.linear import decode as linear_decode
from dsv4.ops.linear import prefill_cutedsl as linear_cutedsl
from dsv4.ops.linear import prefill_long as linear_prefill
from dsv4.ops.linear import prefill_rows
from dsv4.ops.linear import prefill_scaled as linear_scaled
from dsv4.ops.linear import prefill_w16 as linear_w16
from dsv4.ops.linear.prefill_products import RecordLinear
from dsv4.ops.linear.row_list import pack_rows
from dsv4.ops.moe import decode as moe_decode
from dsv4.ops.moe import prefill as moe_prefill
from dsv4.ops.moe import prefill_cutedsl as moe_cutedsl
from dsv4.ops.moe import prefill_scaled as moe_scaled
from dsv4.ops.moe import prefill_w16 as moe_w16
from dsv4.ops.native_packing import native_packing
from dsv4.ops.opening import cuda as opening
from dsv4.ops.prepare_attention import decode as prepare_decode
from dsv4.ops.prepare_attention import prefill as prepare_prefill
from dsv4.ops.sampling import cuda as sampling
from dsv4.ops.token_ring import cuda as token_ring
from dsv4.ops.trees import map_tensors, tensors_in
from dsv4.weights.packed import pack_weight

TableName = Literal["torch", "cuda", "cutedsl"]


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """``portable``: what takes the place of a table with native kernels if these turn out to be
    wrong; it reads the same packed weights. ``reference``: what their results are compared with,
    None for ``portable``. ``refused``: of a portable table, why the native kernels that there are
    for its GPUs are not used.
    """

    portable: "Table | None" = None
    reference: "Table | None" = None
    refused: str | None = None


@dataclass(frozen=True)
class DirectTable(_Choice):
    """Ops that compute when they are called."""

    packing: Packing
    ops: Ops


@dataclass(frozen=True)
class RecordedTable(_Choice):
    """Ops that write to a recording, apart for steps of up to 8 tokens and for longer ones.

    ``exact``: a recording serves only the number of tokens that it was made for, because ops of
    torch are in it.
    """

    packing: Packing
    decode: Callable[[Recording], Ops]
    prefill: Callable[[Recording], Ops]
    exact: bool = False

    def on(self, recording: Recording) -> Ops:
        """The ops that write to ``recording``."""
        is_decode = recording.tokens <= MAX_DECODE_TOKENS
        return self.decode(recording) if is_decode else self.prefill(recording)


Table = DirectTable | RecordedTable


def decode_ops(recording: Recording) -> Ops:
    """The kernels of steps of 1 to 8 tokens."""
    return Ops(
        embed=partial(opening.embed, recording),
        next_positions=partial(opening.next_positions, recording),
        linear=partial(linear_decode.linear, recording),
        linear_rows=partial(linear_decode.linear_rows, recording),
        grouped_linear=partial(linear_decode.grouped_linear, recording),
        row_parallel_linear=partial(exchange_decode.row_parallel_linear, recording),
        vocab_parallel_linear=partial(exchange_decode.vocab_parallel_linear, recording),
        gather_logits=partial(exchange_decode.gather_logits, recording),
        summed=partial(exchange_decode.summed, recording),
        hc_pre=partial(hc_decode.hc_pre, recording),
        hc_seam=partial(hc_decode.hc_seam, recording),
        hc_post=partial(hc_decode.hc_post, recording),
        hc_head=partial(hc_decode.hc_head, recording),
        prepare_attention=partial(prepare_decode.prepare_attention, recording),
        index_select=partial(indexer_decode.index_select, recording),
        sparse_attention=partial(attention_decode.sparse_attention, recording),
        moe=partial(moe_decode.moe, recording),
        sample_token=partial(sampling.sample_token, recording),
        store_token=partial(token_ring.store_token, recording),
    )


def prefill_ops(recording: Recording) -> Ops:
    """The kernels of steps of 9 and more tokens."""
    return replace(
        decode_ops(recording),
        linear=partial(linear_prefill.linear, recording),
        linear_rows=partial(prefill_rows.linear_rows, recording),
        grouped_linear=partial(linear_prefill.grouped_linear, recording),
        **_parallel_products(recording, linear_prefill.linear),
        hc_pre=partial(hc_prefill.hc_pre, recording),
        hc_seam=partial(hc_prefill.hc_seam, recording),
        hc_post=partial(hc_prefill.hc_post, recording),
        hc_head=partial(hc_prefill.hc_head, recording),
        prepare_attention=partial(prepare_prefill.prepare_attention, recording),
        index_select=partial(indexer_prefill.index_select, recording),
        sparse_attention=partial(attention_prefill.sparse_attention, recording),
        moe=partial(moe_prefill.moe, recording),
    )


def _parallel_products(recording: Recording, linear: RecordLinear) -> dict[str, Callable[..., Any]]:
    """The products that ranks share, by an implementation of ``linear``. Logits are those of at
    most 8 tokens in every step.
    """
    return {
        "row_parallel_linear": partial(
            exchange_prefill.row_parallel_linear_with, linear, recording
        ),
        "summed": partial(exchange_prefill.summed, recording),
    }


def cutedsl_prefill_ops(recording: Recording) -> Ops:
    """``prefill_ops`` with the dense products of the CuTe DSL kernel where it takes them."""
    return replace(
        prefill_ops(recording),
        linear=partial(linear_cutedsl.linear, recording),
        linear_rows=partial(linear_cutedsl.linear_rows, recording),
        grouped_linear=partial(linear_cutedsl.grouped_linear, recording),
        **_parallel_products(recording, linear_cutedsl.linear),
        moe=partial(moe_cutedsl.moe, recording),
    )


def native_prefill_ops(activations: ActivationMode) -> Callable[[Recording], Ops]:
    """``prefill_ops`` with products on Blackwell's tensor cores: of activations in 16 bit, or
    rounded where a weight has a native copy. What no kernel takes stays as it is.
    """
    linear_form = linear_w16 if activations == "bf16" else linear_scaled
    moe_form = moe_w16 if activations == "bf16" else moe_scaled

    def ops_on(recording: Recording) -> Ops:
        return replace(
            prefill_ops(recording),
            linear=partial(linear_form.linear, recording),
            linear_rows=partial(linear_form.linear_rows, recording),
            grouped_linear=partial(linear_form.grouped_linear, recording),
            **_parallel_products(recording, linear_form.linear),
            moe=partial(moe_form.moe, recording),
        )

    return ops_on


CUDA_PACKING = Packing("cuda", pack_weight, pack_rows)
TORCH_TABLE = DirectTable(TORCH_PACKING, TORCH)
CUDA_TABLE = RecordedTable(CUDA_PACKING, decode_ops, prefill_ops)
CUTEDSL_TABLE = RecordedTable(CUDA_PACKING, decode_ops, cutedsl_prefill_ops)
NATIVE_TABLES: Mapping[ActivationMode, RecordedTable] = {
    mode: RecordedTable(
        CUDA_PACKING if mode == "bf16" else native_packing(mode),
        decode_ops,
        native_prefill_ops(mode),
    )
    for mode in ACTIVATION_MODES
}
TABLES: Mapping[TableName, Table] = {
    "torch": TORCH_TABLE,
    "cuda": CUDA_TABLE,
    "cutedsl": CUTEDSL_TABLE,
}


def op_table(name: TableName) -> Table:
    """The table of this name. Raises ``UserError`` when its packages are not installed."""
    if name != "torch":
        _expect_package(name, "cuda.core", "cuda-core")
    if name == "cutedsl":
        _expect_package(name, "nvidia_cutlass_dsl", "nvidia-cutlass-dsl")
    return TABLES[name]


def torch_table(mode: ActivationMode) -> DirectTable:
    """The torch ops with activations of ``mode`` in prefill steps."""
    return DirectTable(torch_packing(mode), TORCH)


def swap_ops(table: Table, swaps: Mapping[str, TableName]) -> Table:
    """``table`` with some ops taken from other tables, by name of the op: CUDA ops replaced by
    torch ops.

    Raises ``UserError`` for an unknown op, and for CUDA ops in a torch table, whose weights they
    cannot read.
    """
    names = sorted(field.name for field in fields(Ops))
    for name, source in swaps.items():
        if name not in names:
            raise UserError(f"--swap: found op {name!r}, expected one of {', '.join(names)}")
        if source != "torch" and isinstance(table, DirectTable):
            raise UserError(
                f"--swap: found {name}={source} in the torch ops, expected {name}=torch"
            )
    replaced = [name for name, source in swaps.items() if source == "torch"]
    if isinstance(table, DirectTable) or not replaced:
        return table
    return replace(
        table,
        decode=_with_torch_ops(table.decode, replaced),
        prefill=_with_torch_ops(table.prefill, replaced),
        exact=True,
        portable=None if table.portable is None else swap_ops(table.portable, swaps),
    )


def _with_torch_ops(
    make: Callable[[Recording], Ops], names: list[str]
) -> Callable[[Recording], Ops]:
    def ops_on(recording: Recording) -> Ops:
        ops = make(recording)
        swapped = {
            name: _recorded_torch_op(recording, getattr(ops, name), getattr(TORCH, name))
            for name in names
        }
        return replace(ops, **swapped)

    return ops_on


def _recorded_torch_op(
    recording: Recording, cuda_op: Callable[..., Any], torch_op: Callable[..., Any]
) -> Callable[..., Any]:
    """``torch_op`` as an item of a recording, into buffers of the sizes and dtypes that ``cuda_op``
    returns.
    """

    def op(*arguments: Any, **named: Any) -> Any:
        items = list(recording.items)
        result = cuda_op(*arguments, **named)
        recording.restore(items)
        values = [list(arguments), list(named.values())]
        inputs = list(tensors_in(values))
        outputs = list(tensors_in(result))

        def run(_: int, *memory: Tensor) -> None:
            given = iter(memory[: len(inputs)])
            positional, by_name = map_tensors(values, lambda _: next(given))
            found = tensors_in(torch_op(*positional, **dict(zip(named, by_name, strict=True))))
            for target, value in zip(memory[len(inputs) :], found, strict=True):
                target.copy_(value)

        recording.call(run, *inputs, *outputs)
        return result

    return op


def _expect_package(table: str, module: str, package: str) -> None:
    top, _, _ = module.partition(".")
    if importlib.util.find_spec(top) is None or importlib.util.find_spec(module) is None:
        raise UserError(
            f"ops: {table!r} needs {package}, found none: pip install dsv4[cuda], or ops 'torch'"
        )
