"""The bridge to CuTe DSL: what a compiled kernel is filed under, and what importing it changes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Config(NamedTuple):
    tile: int


class Compiled:
    """Stands for a compiled kernel: its object file has what it was compiled for."""

    def __init__(self, text: str) -> None:
        self.text = text

    def export_to_c(self, path: str, _: str) -> None:
        Path(path).write_text(self.text)


def test_kernels_configurations_and_architectures_have_files_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dsv4.ops.linear.cutedsl import jit

    class First: ...

    class Second: ...

    compiled: list[str] = []

    def compile_kernel(kernel: Any, config: Config, architecture: str) -> Compiled:
        compiled.append(f"{kernel.__name__} {config} {architecture}")
        return Compiled(compiled[-1])

    def loaded(path: Path) -> dict[str, str]:
        return {"gemm": path.read_text()}

    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(jit, "compile_kernel", compile_kernel)
    monkeypatch.setattr(jit, "_module", loaded)
    wanted: list[tuple[Any, Config, str]] = [
        (First, Config(1), "sm_100a"),
        (First, Config(1), "sm_103a"),
        (First, Config(2), "sm_100a"),
        (Second, Config(1), "sm_100a"),
    ]
    for kernel, config, architecture in wanted:
        jit.load.__wrapped__(kernel, config, architecture)
    expected = [f"{kernel.__name__} {config} {name}" for kernel, config, name in wanted]
    assert compiled == expected
    # Another process finds each of them on disk.
    assert [jit.load.__wrapped__(*each) for each in wanted] == expected
    assert compiled == expected


def test_a_file_that_cannot_be_read_counts_as_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that another process has removed, or of a disk that fails."""
    from dsv4.ops.linear.cutedsl import jit

    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(jit, "compile_kernel", lambda *_: Compiled("new"))
    wanted = (Compiled, Config(1), "sm_100a")
    jit.load.__wrapped__(*wanted)
    (file,) = (tmp_path / "cache").iterdir()
    file.unlink()
    file.symlink_to("absent")
    assert jit.load.__wrapped__(*wanted).text == "new"
    assert file.read_text() == "new"
    # Nothing but it is left in the folder.
    assert list((tmp_path / "cache").iterdir()) == [file]


def test_hosts_of_another_kind_have_files_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hosts of B200 and of GB200 have unlike processors, and may share a home folder."""
    from dsv4.ops.linear.cutedsl import jit

    def key() -> str:
        return jit._key(jit.HopperGemm, Config(1), "sm_100a")

    keys = [key()]
    assert key() == keys[0]
    with monkeypatch.context() as patched:
        patched.setattr(jit.platform, "machine", lambda: "other")
        keys.append(key())
    processor = tmp_path / "cpuinfo"
    monkeypatch.setattr(jit, "_PROCESSOR_FILE", processor)
    keys.append(key())  # There is no such file.
    for line in ("flags\t\t: fpu avx2", "flags\t\t: fpu avx2 avx512f", "Features\t: fp asimd"):
        processor.write_text(f"processor\t: 0\n{line}\nbugs\t\t:\n", encoding="utf-8")
        keys.append(key())
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
def test_importing_changes_no_environment_variable() -> None:
    code = (
        "import os; before = dict(os.environ); "
        "from dsv4.ops.linear.cutedsl import jit; "
        "assert dict(os.environ) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
