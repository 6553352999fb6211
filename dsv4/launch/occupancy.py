"""How many clusters of blocks a GPU of this machine runs at once, asked of its driver."""

import functools
import importlib
from typing import Any

import torch

from dsv4.launch.compiler import cached_cubin
from dsv4.launch.kernel import Kernel

# Sizes of clusters that kernels are launched in.
CLUSTER_SIZES = (2, 4, 8)
# Any kernel serves: what decides is the shared memory that is asked for.
_KERNEL = Kernel("token_ring/token_ring", "store_token")
# All that a block may have, so that no second one fits beside it.
_SHARED_BYTES = 227 << 10


@functools.cache
def count_clusters(device: torch.device, architecture: str) -> tuple[tuple[int, int], ...]:
    """(blocks, clusters) for each of ``CLUSTER_SIZES``: how many clusters are resident at once
    where every block fills a multiprocessor. Sizes that the driver refuses are left out.
    """
    bindings = importlib.import_module("cuda.bindings.driver")
    cuda_core = importlib.import_module("cuda.core")
    index = device.index or 0
    # The driver counts for the current device; the one that was current comes back.
    with torch.cuda.device(index):
        cuda_core.Device(index).set_current()
        code = cuda_core.ObjectCode.from_cubin(
            cached_cubin(_KERNEL.source, architecture, _KERNEL.defines)
        )
        handle = int(code.get_kernel(_KERNEL.function).handle)
        attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        bindings.cuKernelSetAttribute(
            attribute, _SHARED_BYTES, bindings.CUkernel(handle), bindings.CUdevice(index)
        )
        found = [(blocks, _clusters_of(bindings, handle, blocks)) for blocks in CLUSTER_SIZES]
    return tuple((blocks, count) for blocks, count in found if count is not None)


def _clusters_of(bindings: Any, handle: int, blocks: int) -> int | None:
    """The driver's count for one size of clusters on the current device."""
    cluster = bindings.CUlaunchAttribute()
    cluster.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x = blocks
    cluster.value.clusterDim.y = 1
    cluster.value.clusterDim.z = 1
    config = bindings.CUlaunchConfig()
    config.gridDimX = blocks
    config.gridDimY = 1
    config.gridDimZ = 1
    config.blockDimX = 32
    config.blockDimY = 1
    config.blockDimZ = 1
    config.sharedMemBytes = _SHARED_BYTES
    config.attrs = [cluster]
    config.numAttrs = 1
    error, count = bindings.cuOccupancyMaxActiveClusters(bindings.CUfunction(handle), config)
    return int(count) if error == bindings.CUresult.CUDA_SUCCESS else None
