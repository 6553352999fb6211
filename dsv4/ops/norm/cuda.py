"""RMS normalisation on the GPU: one block per row."""

import torch
from torch import Tensor

from dsv4.launch.loader import launch

_VECTOR = 8
_MAX_THREADS = 1024


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``dsv4.ops.norm.rms_norm`` for bfloat16 x ``[..., D]``; float32 inside, one rounding.

    Strided x is made contiguous first; a ``weight`` that is not float32 is converted in a launch of its own. Raises
    ``ValueError`` for another dtype of x, a weight of another width, or tensors on different devices.
    """
    width = x.shape[-1]
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x: found {x.dtype}, expected torch.bfloat16")
    if weight is not None and (weight.shape != (width,) or weight.device != x.device):
        raise ValueError(f"weight: found {list(weight.shape)} on {weight.device}, expected [{width}] on {x.device}")
    x, weight = x.contiguous(), weight if weight is None else weight.float().contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    aligned = all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in (x, weight))
    count = _VECTOR if width % _VECTOR == 0 and aligned else 1
    accesses = width // count
    threads = min(-(-accesses // 32) * 32, _MAX_THREADS)
    defines = (("COUNT", count), ("GROUPS", -(-accesses // threads)))
    rows = x.numel() // width
    launch("rms_norm", "rms_norm", rows, threads, x, weight, y, width, eps, device=x.device, defines=defines)
    return y
