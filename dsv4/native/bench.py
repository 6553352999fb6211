"""Benchmarks of prefill products by table: the portable kernels, and the native ones that have
passed their checks on this GPU.
"""

from collections.abc import Callable, Iterator

import torch

from dsv4.launch.recording import Recording
from dsv4.native.forms import NATIVE_FORMS
from dsv4.native.operands import Product
from dsv4.native.verdict_file import verdict_for
from dsv4.ops.immediate import TimedOp
from dsv4.ops.linear.bench_prefill import DENSE
from dsv4.ops.moe.bench import EXPERTS, GEOMETRIES
from dsv4.ops.op_case import OpCase
from dsv4.ops.tables import CUDA_TABLE, RecordedTable
from dsv4.weights.quant import QuantFormat, packed_bytes

TOKENS = (512, 4096)
_FORMATS = (QuantFormat.FP8_BLOCK128, QuantFormat.MXFP4, QuantFormat.NVFP4)


def cases() -> Iterator[OpCase]:
    """Dense products in every quantised format, o_a, and mixtures in both 4-bit formats."""
    for label, table in _tables().items():
        for product in products():
            yield _case(label, table, product)


def products() -> Iterator[Product]:
    """What is measured, on the shapes of the published models."""
    for tokens in TOKENS:
        for matrices in DENSE.values():
            for sizes in matrices:
                for format in _FORMATS:
                    yield Product("linear", format, tokens, sizes)
        yield Product("grouped_linear", QuantFormat.FP8_BLOCK128, tokens, (16, 1024, 4096))
        for format in (QuantFormat.MXFP4, QuantFormat.NVFP4):
            sizes = (*GEOMETRIES["Flash"], EXPERTS["Flash"])
            yield Product("moe", format, tokens, sizes)


def _tables() -> dict[str, RecordedTable]:
    tables = {"portable": CUDA_TABLE}
    if not torch.cuda.is_available():
        return tables
    device = torch.device("cuda", torch.cuda.current_device())
    for mode, form in NATIVE_FORMS.items():
        native = form.table
        if not isinstance(native, RecordedTable) or not form.runs_on(device):
            continue
        if verdict_for(form.checks, device).passed:
            tables[f"native {mode}"] = native
    return tables


def _case(label: str, table: RecordedTable, product: Product) -> OpCase:
    def make(_: int) -> Callable[[], object]:
        device = torch.device("cuda", torch.cuda.current_device())

        def op(recording: Recording, *operands: object) -> object:
            return getattr(table.on(recording), product.op)(*operands)

        return TimedOp(op, *product.operands(table, device)).run

    weights = sum(packed_bytes(format, shape) for format, shape in product.stored_shapes)
    nbytes = weights + 2 * product.values
    return OpCase(f"prefill {label}", product.name, make, nbytes, product.flops, nbytes)
