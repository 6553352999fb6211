"""What importing the package does to the process: nothing."""

import subprocess
import sys

import pytest

from tests.source_rules import ROOT

pytestmark = pytest.mark.slow

# Modules that cannot be imported without a package that only some machines have.
NEEDED = {
    "dsv4.ops.linear.cutedsl.": "cutlass",
    "dsv4.demo.training.sinkhorn": "triton",
    "dsv4.cli.prompts.on_ray": "ray",
}


def run(code: str) -> str:
    """What a fresh process that runs ``code`` writes to stdout."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_dsv4_touches_neither_cuda_nor_the_environment() -> None:
    # Libraries may read their own variables, so they are imported before the environment is taken
    # away.
    run("""
import os, sysconfig, numpy, safetensors.torch, tokenizers, torch
class Forbidden:
    def __getattribute__(self, name):
        raise AssertionError("import read the environment")
    __getitem__ = __setitem__ = __contains__ = __iter__ = __getattribute__
os.environ = os.environb = Forbidden()
from dsv4 import *
assert not torch.cuda.is_initialized(), "import initialised CUDA"
""")


def test_lesson_15_importing_every_module_changes_no_environment_variable() -> None:
    imported = run(f"""
import importlib, os, pkgutil
from importlib.util import find_spec
needed = {NEEDED!r}
for package in set(needed.values()):
    if find_spec(package) is not None:
        importlib.import_module(package)
import numpy, safetensors.torch, tokenizers, torch
before = dict(os.environ)
import dsv4, encoding, single_shot_inference
for package in (dsv4, encoding):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        missing = [need for name, need in needed.items() if module.name.startswith(name)]
        if not any(find_spec(need) is None for need in missing):
            importlib.import_module(module.name)
            print(module.name)
        changed = set(os.environ.items()) ^ set(before.items())
        assert not changed, (module.name, changed)
assert not torch.cuda.is_initialized(), "import initialised CUDA"
""").split()
    files = [path for name in ("dsv4", "encoding") for path in (ROOT / name).rglob("*.py")]
    names = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in files]
    expected = {
        name.removesuffix(".__init__")
        for name in names
        if not name.startswith(tuple(NEEDED)) and name not in ("dsv4.__init__", "encoding.__init__")
    }
    assert expected - set(imported) == set()
    assert len(expected) > 150
