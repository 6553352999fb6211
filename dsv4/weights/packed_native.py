"""PackedWeight with a native copy beside it: decode and portable kernels read the one, block-scaled
tensor cores the other.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

from dsv4.weights.native import NativeWeight, native_weight, unsupported_reason
from dsv4.weights.packed import PackedWeight, pack_weight
from dsv4.weights.quant import QuantFormat, QuantTensor


@dataclass(frozen=True)
class PackedWithNative(PackedWeight):
    """``native``: the same values again. Without, ``unsupported`` says why in one clause."""

    native: NativeWeight | None = None
    unsupported: str | None = None

    def __getitem__(self, index: int) -> Self:
        """One matrix of a stack along the first dimension, without a copy."""
        native = None if self.native is None else self.native[index]
        return replace(super().__getitem__(index), native=native, unsupported=self.unsupported)


def native_format(format: QuantFormat, nvfp4: bool) -> QuantFormat:
    """The format of the native copy of a weight stored in ``format``.

    ``nvfp4``: NVFP4 weights meet NVFP4 activations; else only those that are MXFP4 in disguise have
    a copy, as MXFP4.
    """
    if format is QuantFormat.NVFP4 and not nvfp4:
        return QuantFormat.MXFP4
    return format


def pack_with_native(weight: QuantTensor, nvfp4: bool) -> PackedWithNative:
    """``pack_weight`` and, where there is one, the native copy in ``native_format``."""
    format = native_format(weight.format, nvfp4)
    reason = unsupported_reason(weight, format)
    native = native_weight(weight, format) if reason is None else None
    return with_native(pack_weight(weight), native, reason)


def with_native(
    packed: PackedWeight, native: NativeWeight | None, unsupported: str | None
) -> PackedWithNative:
    """A packed weight and its native copy as one."""
    parts = {field.name: getattr(packed, field.name) for field in fields(PackedWeight)}
    return PackedWithNative(**parts, native=native, unsupported=unsupported)
