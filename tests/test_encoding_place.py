"""The package ``encoding`` of this repository is found beside other folders of that name, which
every published checkpoint holds.
"""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

import dsv4.encoding
from tests.source_rules import ROOT

# dsv4 is found and the current directory comes first, as with an editable install.
IMPORTS = """
import sys
sys.path.append({place!r})
import dsv4
sys.path.remove({place!r})
import dsv4.encoding, dsv4.cli.prompt, dsv4.cli.stream, dsv4.cli.job
assert "encoding" not in sys.modules
assert sys.modules["dsv4.encoding.tokenizer"].__file__.startswith({place!r})
assert dsv4.cli.stream.ContentDelta is dsv4.encoding.ContentDelta
"""
THEN_THEIRS = """
import encoding.encoding_dsv4
assert encoding.encoding_dsv4.x == 1
"""


def run_in_a_checkpoint(folder: Path, code: str, init: str | None) -> None:
    """Runs ``code`` in a folder that holds a folder ``encoding``."""
    theirs = folder / "encoding"
    theirs.mkdir(parents=True)
    (theirs / "encoding_dsv4.py").write_text("x = 1")
    if init is not None:
        (theirs / "__init__.py").write_text(init)
    command = [sys.executable, "-E", "-c", code]  # without PYTHONPATH
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_package_is_the_one_beside_dsv4() -> None:
    assert Path(str(dsv4.encoding.__file__)) == ROOT / "encoding/__init__.py"


@pytest.mark.slow
def test_a_checkpoints_package_does_not_run(tmp_path: Path) -> None:
    code = IMPORTS.format(place=str(ROOT))
    run_in_a_checkpoint(tmp_path, code, "raise SystemExit('code of the checkpoint ran')")


@pytest.mark.slow
def test_a_checkpoints_plain_folder_does_not_shadow_it(tmp_path: Path) -> None:
    run_in_a_checkpoint(tmp_path, IMPORTS.format(place=str(ROOT)) + THEN_THEIRS, None)


@pytest.mark.slow
def test_wheel_and_source_archive_hold_it(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    for name in ("dsv4", "encoding"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = "from setuptools.build_meta import *; build_wheel('..'); build_sdist('..')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "encoding").glob("*.py")}
    assert modules | {"dsv4/encoding.py"} <= packed
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    ZipFile(wheel).extractall(installed)
    run_in_a_checkpoint(tmp_path / "model", IMPORTS.format(place=str(installed)), None)
