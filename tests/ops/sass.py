"""Machine code of compiled kernels, disassembled without a GPU: what the compile tests look at."""

import importlib.metadata
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest

from dsv4.launch.compiler import Compiled, compile_source
from dsv4.launch.kernel import Defines
from tests.shared_results import shared

# PyTorch's builds for CUDA bring NVRTC 13.0, whose assembler spills here and there, and moves loads
# behind a wait. A decode step takes the same time with either (docs/log.md).
_ASSEMBLER = importlib.metadata.version("nvidia-cuda-nvrtc")
ASSEMBLER_IS_13_5 = tuple(map(int, _ASSEMBLER.split(".")[:2])) >= (13, 5)
of_assembler_13_5 = pytest.mark.skipif(
    not ASSEMBLER_IS_13_5,
    reason=f"what CUDA 13.5 makes of the source, found NVRTC {_ASSEMBLER}",
)


def compile_once(source: str, architecture: str, defines: Defines = ()) -> Compiled:
    """What ``compile_source`` gives, for the first test that asks and for all others."""
    return shared(
        (source, architecture, defines), lambda: compile_source(source, architecture, defines)
    )


def resources(log: str) -> dict[str, tuple[int, int]]:
    """(registers, spill bytes) of every entry function in the assembler's report."""
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.partition("'")[0]
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.findall(r"(\d+) bytes spill", part)
        assert registers is not None, part
        found[name] = (int(registers[1]), sum(map(int, spills)))
    return found


def static_shared_bytes(log: str) -> dict[str, int]:
    """Shared memory of every entry function that needs no asking, in the assembler's report."""
    parts = re.split(r"Compiling entry function '", log)[1:]
    found = {part.partition("'")[0]: re.search(r"(\d+) bytes smem", part) for part in parts}
    return {name: int(size[1]) if size else 0 for name, size in found.items()}


def disassemble(source: str, architecture: str, defines: Defines = ()) -> str:
    """SASS text of one source."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compile_once(source, architecture, defines).cubin)
        file.flush()
        return disassemble_cubin(Path(file.name))


def disassemble_cubin(cubin: Path) -> str:
    """SASS text of a file."""
    wheel = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin" / "nvdisasm"
    tool = shutil.which("nvdisasm") or wheel
    return subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout


def without_an_encoding(sass: str) -> list[str]:
    """Asynchronous copies whose target adds a uniform register to a lane's: with a cache hint ptxas
    13.0 gives them an encoding that no GPU knows.
    """
    return re.findall(r"LDGSTS\S* \[R\d+\S*\+UR.*", sass)


def count(sass: str, mnemonic: str) -> int:
    """Instructions whose mnemonic starts with ``mnemonic``, e.g. HMMA or LDG.E.128."""
    return len(
        re.findall(
            rf"^\s+(?:/\*[0-9a-f]+\*/)?\s+(?:@!?U?P\d\s+)?{re.escape(mnemonic)}\b",
            sass,
            re.MULTILINE,
        )
    )
