"""What a compiled kernel consists of: its PTX, its SASS and the registers of a thread."""

import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

from tests.ops.sass import disassemble_cubin


class CompiledFiles(NamedTuple):
    """``ptx`` and ``sass`` as text, ``registers`` of a thread at launch."""

    ptx: str
    sass: str
    registers: int

    @property
    def spills(self) -> bool:
        return re.search(r"\b(STL|LDL)\b", self.sass) is not None


def compile_to_files(kernel: Any, config: Any, architecture: str, folder: Path) -> CompiledFiles:
    """Compiles a kernel of ``dsv4.ops.linear.cutedsl`` and reads what came out."""
    from dsv4.ops.linear.cutedsl import jit

    options = f"--keep-ptx --keep-cubin --dump-dir={folder}"
    jit.compile_kernel(kernel, config, architecture, options)
    (ptx,) = [file.read_text() for file in folder.glob("*.ptx")]
    (cubin,) = folder.glob("*.cubin")
    return CompiledFiles(ptx, disassemble_cubin(cubin), _registers(cubin))


def _registers(cubin: Path) -> int:
    """Registers per thread at launch: attribute EIATTR_REGCOUNT (0x2f, a pair of 32-bit words) of
    the ELF file.
    """
    content = cubin.read_bytes()
    return struct.unpack_from("<II", content, content.index(b"\x04\x2f\x08\x00") + 4)[1]
