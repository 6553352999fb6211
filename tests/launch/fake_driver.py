"""A driver that only writes down what it is asked to launch."""

import ctypes
from types import SimpleNamespace
from typing import Any

from dsv4.launch import loading
from dsv4.launch.kernel import Kernel
from dsv4.launch.tensor_map import MAP_BYTES

bindings = loading.driver()
# Pointers, integers, floats and tensor maps among the arguments.
KINDS = {"rms_norm": "pppif", "moe_sort": "ppppiii", "long_linear": "mmmpppiiiiii"}
TYPES = {"p": ctypes.c_uint64, "i": ctypes.c_int32, "f": ctypes.c_float}


class Driver:
    """Writes down launches: the configuration's numbers, and the words behind the pointers while
    they are valid.
    """

    def __init__(self) -> None:
        self.error = bindings.CUresult.CUDA_SUCCESS
        self.launches: list[SimpleNamespace] = []

    def launch(self, config: Any, kernel: Kernel, parameters: int, extra: int) -> tuple[Any]:
        kinds = KINDS[kernel.function]
        pointers = (ctypes.c_void_p * len(kinds)).from_address(parameters)
        words = [
            ctypes.string_at(at, MAP_BYTES) if kind == "m" else TYPES[kind].from_address(at).value
            for kind, at in zip(kinds, pointers, strict=True)
        ]
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        overlap, *clusters = config.attrs
        (cluster,) = [one.value.clusterDim for one in clusters] or [None]
        found = SimpleNamespace(
            kernel=kernel,
            words=words,
            grid=grid,
            threads=config.blockDimX,
            block=(config.blockDimX, config.blockDimY, config.blockDimZ),
            shared_bytes=config.sharedMemBytes,
            attributes=config.numAttrs,
            attribute_ids=[one.id for one in config.attrs],
            overlaps=overlap.value.programmaticStreamSerializationAllowed,
            cluster=None if cluster is None else (cluster.x, cluster.y, cluster.z),
            stream=int(config.hStream),
        )
        self.launches.append(found)
        return (self.error,)
