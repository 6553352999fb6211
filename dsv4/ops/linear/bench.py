"""Linear layers of a decode step on both models' shapes: single matrices, row lists, o_a and the
head.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.ops.immediate import TimedOp
from dsv4.ops.linear.decode import grouped_linear, linear, linear_rows
from dsv4.ops.linear.row_list import pack_rows
from dsv4.ops.op_case import OpCase
from dsv4.weights.packed import PackedWeight, chunk_columns, padded
from dsv4.weights.quant import QuantFormat, QuantTensor, packed_shapes

NVFP4 = QuantFormat.NVFP4
MXFP4 = QuantFormat.MXFP4
FP8 = QuantFormat.FP8_BLOCK128
BF16 = QuantFormat.BF16
EPS = 1e-6
# (hidden size, query low rank, rows of wq_b, of the indexer's wq_b, o_a groups)
GEOMETRIES = {"Pro": (7168, 1536, 65536, 8192, 16), "Flash": (4096, 1024, 32768, 8192, 8)}
HEAD_DIM = 512
LOW_RANK = 1024
VOCABULARY = 129280


def cases() -> Iterator[OpCase]:
    """Every linear of a CSA and an HCA layer in FP8 and NVFP4 at one token, the large ones at 4 and
    8 as well.
    """
    for model, (hidden, low_rank, query_rows, index_rows, groups) in GEOMETRIES.items():
        for format in (FP8, NVFP4):
            inputs = [(low_rank, format), (HEAD_DIM, format)]
            csa = [*inputs, *((rows, BF16) for rows in (1024, 1024, 256, 256, 64))]
            hca = [*inputs, (HEAD_DIM, BF16), (HEAD_DIM, BF16)]
            yield _rows(f"{model} CSA input rows", csa, hidden, 1)
            yield _rows(f"{model} HCA input rows", hca, hidden, 1)
            for tokens in (1, 4, 8):
                yield _rows(
                    f"{model} query rows",
                    [(query_rows, format), (index_rows, format)],
                    low_rank,
                    tokens,
                    True,
                )
                yield _grouped(f"{model} o_a", groups, format, tokens)
                yield _single(f"{model} o_b", hidden, groups * LOW_RANK, format, tokens)
        for tokens in (1, 4):
            yield _single(f"{model} head", VOCABULARY, hidden, BF16, tokens, torch.float32)
    yield _single("Pro o_b", 7168, 16384, MXFP4, 1)


def random_packed(rows: int, columns: int, format: QuantFormat) -> PackedWeight:
    """Random codes and small random scales in packed order, on the current device."""
    tiles = padded(rows) // 16
    chunks = padded(columns) // chunk_columns(format)
    codes = random_weight(tiles * 16, chunks * chunk_columns(format), format).data
    data = codes.contiguous().view(torch.uint8).view(tiles, chunks, 32, 16)
    scale = None
    if format is FP8:
        scale = (
            torch.rand(packed_shapes(FP8, (rows, columns))["block_scale"] or (), device="cuda")
            * 0.01
        )
    elif format is not BF16:
        shape = (tiles, padded(columns) // 64, 8, 8 if format is NVFP4 else 4)
        scale = torch.randint(100, 120, shape, dtype=torch.uint8, device="cuda") - (
            68 if format is NVFP4 else 0
        )
    total = torch.tensor(0.01, device="cuda") if format is NVFP4 else None
    return PackedWeight(data, scale, total, format, (rows, columns))


def random_weight(rows: int, columns: int, format: QuantFormat) -> QuantTensor:
    """Random codes and scales as stored, on the current device; values of the order of 0.1."""
    shapes = packed_shapes(format, (rows, columns))
    if format is BF16:
        return QuantTensor.dense(
            torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * 0.1
        )
    codes = torch.randint(0, 256, shapes["data"] or (), dtype=torch.uint8, device="cuda")
    if format is FP8:
        # All but NaN (0x7F and 0xFF), and no value above 2.
        codes = (codes & 0xBF).view(torch.float8_e4m3fn)
        return QuantTensor(
            codes,
            torch.rand(shapes["block_scale"] or (), device="cuda"),
            None,
            format,
            (rows, columns),
        )
    scale = torch.randint(32, 52, shapes["block_scale"] or (), dtype=torch.uint8, device="cuda")
    if format is NVFP4:
        total = torch.tensor(0.1, device="cuda")
        return QuantTensor(codes, scale.view(torch.float8_e4m3fn), total, format, (rows, columns))
    return QuantTensor(
        codes, (scale // 4 + 112).view(torch.float8_e8m0fnu), None, format, (rows, columns)
    )


def _x(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def _weight_bytes(rows: int, columns: int, format: QuantFormat) -> int:
    bits = {NVFP4: 4.5, MXFP4: 4.25, FP8: 8.0, BF16: 16.0}[format]
    return int(rows * columns * bits / 8)


def _case(
    name: str,
    weight_bytes: int,
    io_bytes: int,
    flops: int,
    make: Callable[[int], Callable[[], object]],
) -> OpCase:
    return OpCase("linear", name, make, weight_bytes + io_bytes, flops, weight_bytes)


def _single(
    name: str,
    rows: int,
    columns: int,
    format: QuantFormat,
    tokens: int,
    out_dtype: torch.dtype = torch.bfloat16,
) -> OpCase:
    def make(index: int) -> Callable[[], object]:
        weight = random_packed(rows, columns, format)
        x = _x(tokens, columns)
        return TimedOp(linear, x, weight, out_dtype).run

    io_bytes = tokens * (2 * columns + out_dtype.itemsize * rows)
    name = f"{name} {rows}x{columns} {format.value} T={tokens}"
    return _case(
        name, _weight_bytes(rows, columns, format), io_bytes, 2 * tokens * rows * columns, make
    )


def _grouped(name: str, groups: int, format: QuantFormat, tokens: int) -> OpCase:
    columns = 8 * HEAD_DIM

    def make(index: int) -> Callable[[], object]:
        weight = random_packed(groups * LOW_RANK, columns, format)
        x = _x(tokens, groups, columns)
        return TimedOp(grouped_linear, x, weight).run

    rows = groups * LOW_RANK
    io_bytes = 2 * tokens * (groups * columns + rows)
    name = f"{name} {groups}x{LOW_RANK}x{columns} {format.value} T={tokens}"
    return _case(
        name, _weight_bytes(rows, columns, format), io_bytes, 2 * tokens * rows * columns, make
    )


def _rows(
    name: str,
    matrices: Sequence[tuple[int, QuantFormat]],
    columns: int,
    tokens: int,
    queries: bool = False,
) -> OpCase:
    dtypes = [torch.float32 if format is BF16 else None for _, format in matrices]

    def make(index: int) -> Callable[[], object]:
        rows = pack_rows(
            [random_weight(count, columns, format) for count, format in matrices], dtypes
        )
        x = _x(tokens, columns)
        norm_weight = None
        if queries:
            rows = replace(rows, for_choice=1)
            norm_weight = torch.rand(columns, device="cuda")
        return TimedOp(linear_rows, x, rows, norm_weight, EPS).run

    weight_bytes = sum(_weight_bytes(count, columns, format) for count, format in matrices)
    total = sum(count for count, _ in matrices)
    io_bytes = tokens * (
        2 * columns + sum((4 if format is BF16 else 2) * count for count, format in matrices)
    )
    counts = "+".join(str(count) for count, _ in matrices)
    name = f"{name} {counts}x{columns} {matrices[0][1].value} T={tokens}"
    return _case(name, weight_bytes, io_bytes, 2 * tokens * total * columns, make)
