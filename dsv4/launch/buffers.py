"""Where a tensor lies in its buffer: known of buffers without memory too."""

from torch import Tensor


def storage_key(tensor: Tensor) -> int:
    """Equal for the views of one buffer."""
    return tensor.untyped_storage()._cdata


def byte_offset(tensor: Tensor) -> int:
    """The bytes from the beginning of the buffer to the first element."""
    return int(tensor.storage_offset()) * tensor.itemsize


def is_aligned(tensor: Tensor, nbytes: int = 16) -> bool:
    """Whether the tensor begins at a multiple of ``nbytes`` (at most 512)."""
    return (byte_offset(tensor) if tensor.is_meta else tensor.data_ptr()) % nbytes == 0
