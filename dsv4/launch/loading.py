"""Loads compiled kernels through the CUDA driver, once per device."""

import functools
import importlib
from typing import Any

import torch

from dsv4.launch.compiler import cached_cubin
from dsv4.launch.kernel import Defines, Kernel
from dsv4.launch.target import Target


@functools.cache
def driver() -> Any:
    """The driver's bindings, imported when a program is made: recording and planning work without
    them.
    """
    return importlib.import_module("cuda.bindings.driver")


@functools.cache
def _module(source: str, architecture: str, defines: Defines) -> Any:
    return importlib.import_module("cuda.core").ObjectCode.from_cubin(
        cached_cubin(source, architecture, defines)
    )


@functools.cache
def loaded(kernel: Kernel, target: Target) -> Any:
    """The function of a compiled kernel on the target's device. The current device stays."""
    device = importlib.import_module("cuda.core").Device(target.device.index or 0)
    current = torch.cuda.current_device()
    device.set_current()
    module = _module(kernel.source, target.architecture, kernel.defines)
    function = driver().CUfunction(int(module.get_kernel(kernel.function).handle))
    torch.cuda.set_device(current)
    return function


@functools.cache
def allow_shared_memory(kernel: Kernel, target: Target, shared_bytes: int) -> None:
    """Raises the kernel's limit of shared memory per block to at least ``shared_bytes``.

    The limit never falls, because one kernel is launched with several sizes.
    """
    bindings = driver()
    attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = bindings.CUdevice(target.device.index or 0)
    handle = bindings.CUkernel(int(loaded(kernel, target)))
    error, allowed = bindings.cuKernelGetAttribute(attribute, handle, device)
    if error == bindings.CUresult.CUDA_SUCCESS and allowed >= shared_bytes:
        return
    (error,) = bindings.cuKernelSetAttribute(attribute, shared_bytes, handle, device)
    if error != bindings.CUresult.CUDA_SUCCESS:
        found = f"{kernel.function} with {shared_bytes} bytes per block"
        raise RuntimeError(f"shared memory: found {found}, more than there are ({error.name})")
