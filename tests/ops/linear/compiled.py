"""Products in CuTe DSL, compiled once in a test run: for the machine that executes their PTX, and
for the tests of their machine code.
"""

import re
import struct
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.ops.sass import disassemble_cubin
from tests.ptx.run import CompiledKernel
from tests.shared_results import shared


class CompiledProduct:
    """``kernel`` for the machine, its ``cubin``, and the processor time that compiling took."""

    def __init__(self, kernel: CompiledKernel, cubin: bytes, seconds: float):
        self.kernel = kernel
        self.cubin = cubin
        self.seconds = seconds

    @property
    def ptx(self) -> str:
        return self.kernel.ptx

    @cached_property
    def sass(self) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return disassemble_cubin(Path(file.name))

    @property
    def spills(self) -> bool:
        return re.search(r"\b(STL|LDL)\b", self.sass) is not None

    @property
    def registers(self) -> int:
        """Of a thread at launch: attribute EIATTR_REGCOUNT (0x2f, a pair of 32-bit words) of the
        ELF file.
        """
        at = self.cubin.index(b"\x04\x2f\x08\x00") + 4
        return struct.unpack_from("<II", self.cubin, at)[1]


def compile_once(kernel: Any, config: Any, architecture: str) -> CompiledProduct:
    """A class of ``dsv4.ops.linear.cutedsl`` for a configuration."""
    key = (kernel.__name__, config, architecture)
    return shared(key, lambda: _compile(kernel, config, architecture))


def _compile(kernel: Any, config: Any, architecture: str) -> CompiledProduct:
    from dsv4.ops.linear.cutedsl import jit

    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --keep-cubin --dump-dir={folder}"
        compiled = jit.compile_kernel(kernel, config, architecture, options)
        seconds = time.process_time() - begin
        (cubin,) = Path(folder).glob("*.cubin")
        return CompiledProduct(CompiledKernel.of(compiled), cubin.read_bytes(), seconds)
