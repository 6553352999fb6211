"""Parameters to the tensors that are written: names, dtypes and shapes of a layout, values on
demand.
"""

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dsv4.checkpoint.formats import COMPONENTS
from dsv4.checkpoint.layouts import Layout, format_in
from dsv4.checkpoint.names import Dialect, from_native
from dsv4.checkpoint.writer import OutputTensor
from dsv4.errors import UserError
from dsv4.weights.parameters import Parameter, Role
from dsv4.weights.quant import QuantFormat, QuantTensor, packed_shapes

_DTYPES = {
    (QuantFormat.NVFP4, "data"): torch.uint8,
    (QuantFormat.NVFP4, "block_scale"): torch.float8_e4m3fn,
    (QuantFormat.NVFP4, "global_scale"): torch.float32,
    (QuantFormat.MXFP4, "data"): torch.int8,
    (QuantFormat.MXFP4, "block_scale"): torch.float8_e8m0fnu,
    (QuantFormat.FP8_BLOCK128, "data"): torch.float8_e4m3fn,
    (QuantFormat.BF16, "data"): torch.bfloat16,
    (QuantFormat.F32, "data"): torch.float32,
}


class WeightSource(Protocol):
    """Gives the values that are written, one matrix at a time; ``expert`` is None except for EXPERT
    parameters.
    """

    def matrix(self, parameter: Parameter, expert: int | None) -> QuantTensor:
        """A LINEAR or FLOOR matrix, or one expert of an EXPERT parameter, in the format of the
        layout.
        """
        ...

    def plain(self, parameter: Parameter) -> Tensor:
        """A NORM, FLOAT or TABLE parameter in any dtype that converts."""
        ...

    def input_scale(self, parameter: Parameter, expert: int | None) -> Tensor | None:
        """float32 ``[]`` activation scale of an NVFP4 matrix, or None when there is none."""
        ...

    def fp8_scale_dtype(self, parameter: Parameter) -> torch.dtype:
        """float8_e8m0fnu or float32: how the block scales of an FP8 matrix are stored."""
        ...


def output_tensors(
    layout: Layout, dialect: Dialect, parameters: dict[str, Parameter], source: WeightSource
) -> list[OutputTensor]:
    """All tensors of a checkpoint in ``layout`` with the names of ``dialect``, in the order of
    ``parameters``.

    The experts of a layer follow each other, each with w1, w2 and w3. Unquantised experts in the hf
    dialect are fused into ``gate_up_proj`` [X, 2F, E] and ``down_proj`` [X, E, F], as transformers
    has them.
    """
    fused = dialect is Dialect.HF and layout in ("bf16", "f32")
    tensors: list[OutputTensor] = []
    for parameter in parameters.values():
        if parameter.role is not Role.EXPERT:
            tensors += _single(layout, parameter, source)
        elif parameter.name.endswith(".w1.weight"):
            prefix = parameter.name.removesuffix(".w1.weight")
            projections = {
                name: parameters[f"{prefix}.{name}.weight"] for name in ("w1", "w2", "w3")
            }
            # The modules of mtp have no names in the hf dialect and therefore stay as they are.
            experts = _fused_experts if fused and not prefix.startswith("mtp.") else _experts
            tensors += experts(layout, prefix, projections, source)
    return [tensor._replace(name=from_native(tensor.name, dialect)) for tensor in tensors]


def _single(layout: Layout, parameter: Parameter, source: WeightSource) -> Iterator[OutputTensor]:
    if parameter.role in (Role.LINEAR, Role.FLOOR):
        yield from _matrix(layout, parameter.name.removesuffix(".weight"), parameter, None, source)
        return
    norm = torch.float32 if layout == "f32" else torch.bfloat16
    dtype = {Role.NORM: norm, Role.FLOAT: torch.float32, Role.TABLE: torch.int64}[parameter.role]
    yield OutputTensor(
        parameter.name, dtype, parameter.shape, lambda: [source.plain(parameter).to(dtype)]
    )


def _experts(
    layout: Layout, prefix: str, projections: dict[str, Parameter], source: WeightSource
) -> Iterator[OutputTensor]:
    for expert in range(projections["w1"].shape[0]):
        for name, parameter in projections.items():
            yield from _matrix(layout, f"{prefix}.{expert}.{name}", parameter, expert, source)


def _fused_experts(
    layout: Layout, prefix: str, projections: dict[str, Parameter], source: WeightSource
) -> Iterator[OutputTensor]:
    experts, width, hidden = projections["w1"].shape
    dtype = torch.float32 if layout == "f32" else torch.bfloat16

    def rows(*names: str) -> Iterator[Tensor]:
        for expert in range(experts):
            yield from (source.matrix(projections[name], expert).data for name in names)

    yield OutputTensor(
        f"{prefix}.w13.weight", dtype, (experts, 2 * width, hidden), partial(rows, "w1", "w3")
    )
    yield OutputTensor(f"{prefix}.w2.weight", dtype, (experts, hidden, width), partial(rows, "w2"))


def _matrix(
    layout: Layout, module: str, parameter: Parameter, expert: int | None, source: WeightSource
) -> Iterator[OutputTensor]:
    format = format_in(layout, parameter)
    assert format is not None
    try:
        shapes = packed_shapes(format, parameter.shape if expert is None else parameter.shape[1:])
    except ValueError as error:
        raise UserError(f"{parameter.name}: {error}") from None
    for part, component in COMPONENTS[format].items():
        dtype = _DTYPES.get((format, part)) or source.fp8_scale_dtype(parameter)
        shape = shapes[part]
        assert shape is not None
        produce = partial(_produce, source, parameter, expert, part, dtype)
        yield OutputTensor(f"{module}.{component}", dtype, shape, produce)
    scale = source.input_scale(parameter, expert) if format is QuantFormat.NVFP4 else None
    if scale is not None:
        yield OutputTensor(f"{module}.input_scale", torch.float32, (), lambda: [scale])


def _produce(
    source: WeightSource, parameter: Parameter, expert: int | None, part: str, dtype: torch.dtype
) -> list[Tensor]:
    matrix = source.matrix(parameter, expert)
    tensor = {
        "data": matrix.data,
        "block_scale": matrix.block_scale,
        "global_scale": matrix.global_scale,
    }[part]
    assert tensor is not None
    return [tensor.view(dtype) if tensor.dtype is torch.uint8 else tensor]
