"""Machine code of compiled kernels, disassembled without a GPU: what the compile tests look at."""

import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest

from dsv4.launch.compiler import compile_source
from dsv4.launch.kernel import Defines


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


def disassemble(source: str, architecture: str, defines: Defines = ()) -> str:
    """SASS text of one source; skips the test where no disassembler is installed."""
    tool = shutil.which("nvdisasm") or _wheel_tool()
    if tool is None:
        pytest.skip("no nvdisasm (wheel nvidia-cuda-nvdisasm)")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compile_source(source, architecture, defines).cubin)
        file.flush()
        return subprocess.run(
            [tool, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout


def count(sass: str, mnemonic: str) -> int:
    """Instructions whose mnemonic starts with ``mnemonic``, e.g. HMMA or LDG.E.128."""
    return len(
        re.findall(
            rf"^\s+(?:/\*[0-9a-f]+\*/)?\s+(?:@!?U?P\d\s+)?{re.escape(mnemonic)}\b",
            sass,
            re.MULTILINE,
        )
    )


def _wheel_tool() -> str | None:
    tool = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin" / "nvdisasm"
    return str(tool) if tool.is_file() else None
