"""Memory of GPUs that other GPUs reach."""

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from dsv4.errors import UserError
from dsv4.launch.loading import driver

_REACHABLE = "GPUs that reach each other's memory"


def reach_each_other(devices: Sequence[torch.device]) -> bool:
    """``allow_peer_access``, and whether all of the GPUs can."""
    try:
        allow_peer_access(devices)
    except UserError:
        return False
    return True


def allow_peer_access(devices: Sequence[torch.device]) -> None:
    """Lets kernels on each of the GPUs read and write the memory of the others.

    Raises ``UserError`` for a pair that cannot.
    """
    check_peer_access(devices)
    bindings = driver()
    known = (
        bindings.CUresult.CUDA_SUCCESS,
        bindings.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
    )
    contexts = {}
    for device in devices:
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)
            _, contexts[device] = bindings.cuDevicePrimaryCtxRetain(device.index or 0)
    for device, other in permutations(devices, 2):
        with torch.cuda.device(device):
            bindings.cuCtxSetCurrent(contexts[device])
            (error,) = bindings.cuCtxEnablePeerAccess(contexts[other], 0)
        if error not in known:
            raise UserError(
                f"EngineConfig.parallel='tensor': found {error.name} for access from {device} "
                f"to {other}, expected {_REACHABLE}"
            )


def check_peer_access(devices: Sequence[torch.device]) -> None:
    """Raises ``UserError`` for a pair of GPUs that cannot reach each other's memory."""
    for device, other in permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(device, other):
            raise UserError(
                f"EngineConfig.parallel='tensor': found no peer access from {device} to {other}, "
                f"expected {_REACHABLE}"
            )


class _DeviceMemory:
    """Bytes of ``cuMemAlloc`` at ``address``, which end with it."""

    def __init__(self, address: Any, nbytes: int) -> None:
        # The end of the program may leave no names of this module.
        self._free = driver().cuMemFree
        self._address = address
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (int(address), False),
            "version": 3,
        }

    def __del__(self) -> None:
        self._free(self._address)


def _allocated(nbytes: int, device: torch.device) -> _DeviceMemory:
    """Of the current device, for its peers to read and write however torch allocates its own."""
    bindings = driver()
    error, address = bindings.cuMemAlloc(nbytes)
    if error != bindings.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"exchange on {device}: found {error.name} for {nbytes} bytes")
    return _DeviceMemory(address, nbytes)


def shared_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that all GPUs with access to the device can read and write."""
    if device.type != "cuda" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    with torch.cuda.device(device):
        memory = _allocated(math.prod(shape) * dtype.itemsize, device)
        return torch.as_tensor(memory, device=device).zero_().view(dtype).view(shape)
