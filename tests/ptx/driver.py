"""A CUDA driver that writes down what a host function launches, and runs nothing."""

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from tests.ptx.faults import Fault
from tests.ptx.launch import Launch

_INT = ctypes.c_int32
_POINTER = ctypes.c_void_p
_CLUSTER = 4
_PROGRAMMATIC = 6
_ATTRIBUTE_BYTES = 72
_SHARED_PER_BLOCK = 232448


class RecordingDriver:
    """Entry points for a ``HostObject``; ``parameter_sizes`` are those of each kernel."""

    def __init__(self, parameter_sizes: dict[str, list[int]]):
        self.parameter_sizes = parameter_sizes
        self.launches: list[Launch] = []
        self.errors: list[str] = []
        self.calls: list[str] = []
        self.kernels: list[str] = []
        self._callbacks: list[Any] = []
        text = ctypes.c_char_p
        self.symbols = {
            "_cudaGetDevice": self._entry(_INT, [_POINTER], self._get_device),
            "_cudaSetDevice": self._entry(_INT, [_INT], self._succeed),
            "_cudaDeviceGetAttribute": self._entry(_INT, [_POINTER, _INT, _INT], self._attribute),
            "_cuKernelGetAttribute": self._entry(
                _INT, [_POINTER, _INT, _POINTER, _INT], self._attribute
            ),
            "_cudaFuncSetAttribute": self._entry(_INT, [_POINTER, _INT, _INT], self._succeed),
            "_cudaKernelSetAttributeForDevice": self._entry(
                _INT, [_POINTER, _INT, _INT, _INT], self._succeed
            ),
            "_cudaLibraryLoadData": self._entry(_INT, [_POINTER] * 8, self._succeed),
            "_cudaLibraryGetKernel": self._entry(_INT, [_POINTER] * 2 + [text], self._get_kernel),
            "_cudaLaunchKernelEx": self._entry(_INT, [_POINTER] * 3, self._launch),
            "cuda_dialect_init_library_once": self._entry(_INT, [_POINTER] * 6, self._init),
            "cuda_dialect_unload_library_once": self._entry(_INT, [_POINTER] * 6, self._succeed),
            "TVMFFIEnvGetStream": self._entry(_POINTER, [_INT, _INT], self._succeed),
            "TVMFFIErrorSetRaisedFromCStr": self._entry(None, [text, text], self._raise),
            "TVMFFIErrorSetRaisedFromCStrParts": self._entry(
                None, [text, ctypes.POINTER(text), _INT], self._raise_parts
            ),
            "CuteDSLRT_TVMFFISetRaisedCudaError": self._entry(None, [_INT], self._raise_cuda),
        }

    def _entry(self, result: Any, arguments: list[Any], function: Callable[..., Any]) -> int:
        def called(*values: Any) -> Any:
            self.calls.append(function.__name__)
            return function(*values)

        callback = ctypes.CFUNCTYPE(result, *arguments)(called)
        self._callbacks.append(callback)
        address = ctypes.cast(callback, _POINTER).value
        assert address is not None
        return address

    def _succeed(self, *arguments: Any) -> int:
        return 0

    def _init(self, *arguments: Any) -> int:
        return 0

    def _get_device(self, out: int) -> int:
        ctypes.c_int32.from_address(out).value = 0
        return 0

    def _attribute(self, out: int, *what: Any) -> int:
        ctypes.c_int32.from_address(out).value = _SHARED_PER_BLOCK
        return 0

    def _get_kernel(self, out: int, library: int, name: bytes) -> int:
        self.kernels.append(name.decode())
        ctypes.c_uint64.from_address(out).value = len(self.kernels)
        return 0

    def _raise(self, kind: bytes, message: bytes) -> None:
        self.errors.append(f"{kind.decode()}: {message.decode()}")

    def _raise_parts(self, kind: bytes, parts: Any, count: int) -> None:
        self._raise(kind, b"".join(parts[n] for n in range(count)))

    def _raise_cuda(self, code: int) -> None:
        self.errors.append(f"CUDA error {code}")

    def _launch(self, configuration: int, function: int, arguments: int) -> int:
        raw = ctypes.string_at(configuration, 56)
        sizes = struct.unpack_from("<6I", raw)
        shared_bytes, _, attributes = struct.unpack_from("<QQQ", raw, 24)
        (count,) = struct.unpack_from("<I", raw, 48)
        found = {}
        for n in range(count):
            attribute = ctypes.string_at(attributes + _ATTRIBUTE_BYTES * n, _ATTRIBUTE_BYTES)
            found[struct.unpack_from("<I", attribute)[0]] = attribute[8:]
        kernel = self._kernel(function)
        pointers = (ctypes.c_uint64 * len(self.parameter_sizes[kernel])).from_address(arguments)
        self.launches.append(
            Launch(
                kernel,
                sizes[:3],
                sizes[3:],
                tuple(
                    ctypes.string_at(pointer, size)
                    for pointer, size in zip(pointers, self.parameter_sizes[kernel], strict=True)
                ),
                struct.unpack_from("<3I", found.get(_CLUSTER, struct.pack("<3I", 1, 1, 1))),
                shared_bytes,
                found.get(_PROGRAMMATIC, b"\0")[0] != 0,
                found,
            )
        )
        return 0

    def _kernel(self, function: int) -> str:
        names = list(self.parameter_sizes)
        if 1 <= (function or 0) <= len(self.kernels):
            return self.kernels[function - 1]
        if len(names) != 1:
            raise Fault("which of several kernels is launched is not known")
        return names[0]
