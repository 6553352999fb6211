"""Products in CuTe DSL, compiled once in a test run: for the machine that executes their PTX, and
for the tests of their machine code.
"""

import re
import struct
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tests.ops.sass import disassemble_cubin
from tests.ptx.run import CompiledKernel
from tests.shared_results import shared

Config = TypeVar("Config")


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


def largest_of_each(
    configs: Iterable[Config], size: Callable[[Config], int], kind: Callable[[Config], Hashable]
) -> list[Config]:
    """Of every kind the configuration with the largest work tile, the last one of several."""
    return list({kind(config): config for config in sorted(configs, key=size)}.values())


def assert_same_program(kernel: Any, config: Any) -> None:
    """sm_103a gets the PTX of sm_100a, so that its largest kernels stand for all of them."""
    first, other = (compile_once(kernel, config, one).ptx for one in ("sm_100a", "sm_103a"))
    assert other == first.replace("sm_100a", "sm_103a")


def _compile(kernel: Any, config: Any, architecture: str) -> CompiledProduct:
    from dsv4.ops.linear.cutedsl import jit

    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --keep-cubin --dump-dir={folder}"
        compiled = jit.compile_kernel(kernel, config, architecture, options)
        seconds = time.process_time() - begin
        (cubin,) = Path(folder).glob("*.cubin")
        return CompiledProduct(CompiledKernel.of(compiled), cubin.read_bytes(), seconds)
