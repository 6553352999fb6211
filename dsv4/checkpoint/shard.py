"""One safetensors file: its header, checked before anything is believed, and its tensors,
memory-mapped one at a time.

Layout of a file: 8 bytes header length (little endian), the header (JSON: name → dtype, shape,
data_offsets), the data.
"""

import math
import mmap
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from dsv4.checkpoint.problems import printable
from dsv4.errors import UserError, shorten
from dsv4.json_object import parse_json_object

MAX_HEADER_BYTES = 100_000_000
# Five for each of the 290,000 tensors of V4-Pro in NVFP4 are 1.5 million. More take long to parse.
MAX_HEADER_VALUES = 2_500_000
MAX_DIMENSIONS = 8
MAX_DIMENSION = 2**40

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class StoredTensor(NamedTuple):
    """Where one tensor lies: ``nbytes`` bytes at ``offset`` of ``file``."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(NamedTuple):
    """What a safetensors file says before its data: ``text`` is its JSON, ``metadata`` as it
    stands there, which may be anything.
    """

    text: bytes
    metadata: Any
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a safetensors file by name, in file order; reads no tensor bytes. Raises as
    ``read_whole_header`` does.
    """
    return read_whole_header(path).tensors


def read_whole_header(path: Path) -> Header:
    """The header of a safetensors file; reads no tensor bytes.

    Raises ``UserError`` naming the file when it is not a regular file, is truncated (found and
    expected bytes), or has a header that is not JSON, repeats a name, has an unknown dtype, or
    whose byte ranges overlap, leave gaps or end outside the file.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(
                f"{path}: found something that is not a regular file, expected a safetensors file"
            )
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise UserError(
                    f"{path}: truncated or not a safetensors file: found {size} bytes, "
                    f"expected 8 and a header of {length} bytes (at most {MAX_HEADER_BYTES})"
                )
            text = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    check_header_text(path, text)
    try:
        header = parse_json_object(text.decode("utf-8"), f"{path}: header")
    except UnicodeDecodeError:
        raise UserError(f"{path}: header: found bytes that are not UTF-8, expected JSON") from None
    metadata = header.pop("__metadata__", None)
    tensors = {
        name: _stored_tensor(path, name, entry, 8 + length) for name, entry in header.items()
    }
    _check_ranges(path, tensors, 8 + length, size)
    return Header(text, metadata, tensors)


def check_header_text(path: Path, text: bytes) -> None:
    """Raises ``UserError`` for a header that is longer than ``read_whole_header`` takes."""
    values = text.count(b",") + 1
    for found, most, what in (
        (len(text), MAX_HEADER_BYTES, "bytes"),
        (values, MAX_HEADER_VALUES, "JSON values"),
    ):
        if found > most:
            raise UserError(f"{path}: header: found {found} {what}, expected at most {most}")


def _stored_tensor(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype = fields.get("dtype")
    shape = fields.get("shape")
    offsets = fields.get("data_offsets")

    def wrong(what: str) -> UserError:
        return UserError(f"{path}: header of {printable(name)}: {what}")

    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        raise wrong(f"dtype: found {shorten(dtype)}, expected one of {', '.join(TORCH_DTYPES)}")
    if not _integers(shape, MAX_DIMENSION) or len(shape) > MAX_DIMENSIONS:
        expected = f"up to {MAX_DIMENSIONS} sizes, each an integer from 0 to {MAX_DIMENSION}"
        raise wrong(f"shape: found {shorten(shape)}, expected {expected}")
    if not _integers(offsets, 2**63) or len(offsets) != 2:
        raise wrong(f"data_offsets: found {shorten(offsets)}, expected [begin, end]")
    nbytes = math.prod(shape) * TORCH_DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise wrong(f"data_offsets: found {offsets}, expected {nbytes} bytes for {dtype} {shape}")
    return StoredTensor(path, TORCH_DTYPES[dtype], tuple(shape), data_start + offsets[0], nbytes)


def _integers(values: Any, limit: int) -> TypeGuard[list[int]]:
    # A list, and no generator: this is asked twice of each of some hundred thousand tensors.
    return isinstance(values, list) and not [
        value for value in values if type(value) is not int or not 0 <= value <= limit
    ]


def _check_ranges(path: Path, tensors: dict[str, StoredTensor], data_start: int, size: int) -> None:
    end = data_start
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset != end:
            kind = (
                "overlaps the tensor before it" if stored.offset < end else "leaves a gap before it"
            )
            raise UserError(
                f"{path}: {printable(name)} {kind}: found offset {stored.offset}, expected {end}"
            )
        end = stored.offset + stored.nbytes
    if end != size:
        kind = "truncated" if size < end else "bytes after the last tensor"
        raise UserError(f"{path}: {kind}: found {size} bytes, expected {end}")


def map_tensor(stored: StoredTensor) -> Tensor:
    """The tensor, memory-mapped; its pages are released with it. Raises ``UserError`` when the file
    has changed.
    """
    if stored.nbytes == 0:
        return torch.empty(stored.shape, dtype=stored.dtype)
    start = stored.offset - stored.offset % mmap.ALLOCATIONGRANULARITY
    inside = stored.offset - start
    try:
        with stored.file.open("rb") as file:
            # Copy-on-write: torch wants writable memory, and the file stays as it is whatever is
            # done with the tensor.
            mapped = mmap.mmap(
                file.fileno(), inside + stored.nbytes, access=mmap.ACCESS_COPY, offset=start
            )
    except (OSError, ValueError) as error:
        raise UserError(f"{stored.file}: cannot be mapped ({error})") from None
    data = torch.frombuffer(mapped, dtype=torch.uint8, count=stored.nbytes, offset=inside)
    if data.data_ptr() % stored.dtype.itemsize:
        data = data.clone()
    return data.view(stored.dtype).view(stored.shape)
