"""The structural rules of docs/contributing.md, checked on the syntax trees of ``dsv4`` and
``encoding``.
"""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_DRIVER_LINES = 200
MAX_README_LINES = 150

COMMAND_LINE = (
    "dsv4/cli/",
    "dsv4/demo/",
    "dsv4/validate/",
    "dsv4/checkpoint/export.py",
    "dsv4/bench/",
    "dsv4/measure/",
)
KERNELS = ("dsv4/launch/", "dsv4/ops/linear/cutedsl/", "dsv4/ops/linear/decode_plan.py")
MAY_PRINT = COMMAND_LINE
MAY_READ_ENVIRONMENT = (*COMMAND_LINE, "dsv4/launch/compiler.py")
MAY_CACHE = KERNELS
MAY_READ_FILES = (
    *COMMAND_LINE,
    *KERNELS,
    "dsv4/checkpoint/",
    "dsv4/json_object.py",
    "dsv4/plan.py",
    "encoding/",
)

LEAVES = (
    "dsv4.config",
    "dsv4.engine_config",
    "dsv4.limits",
    "dsv4.errors",
    "dsv4.json_object",
)
ABOVE_THE_ENGINE = ("dsv4.cli", "dsv4.demo", "dsv4.validate", "dsv4.bench", "dsv4.measure")
ABOVE_THE_MODEL = (
    *ABOVE_THE_ENGINE,
    "dsv4.engine",
    "dsv4.checkpoint",
    "dsv4.decode",
    "dsv4.step",
    "dsv4.sampling",
)
# A module under the prefix imports nothing of dsv4 except itself and the listed prefixes ...
IMPORTS_ONLY = {
    **dict.fromkeys(LEAVES, LEAVES),
    "dsv4.parallel.hand_off": (),
    "dsv4.weights": LEAVES,
    "dsv4.caches": (*LEAVES, "dsv4.weights"),
    "dsv4.launch": (*LEAVES, "dsv4.weights"),
    "dsv4.ops": (*LEAVES, "dsv4.weights", "dsv4.caches", "dsv4.launch"),
    "encoding": (),
}
# ... or nothing of the listed prefixes.
NEVER_IMPORTS = {
    "dsv4.layers": (*ABOVE_THE_MODEL, "dsv4.model"),
    "dsv4.model": ABOVE_THE_MODEL,
    "dsv4.parallel": (*ABOVE_THE_MODEL, "dsv4.model"),
    "dsv4.sampling": (*ABOVE_THE_ENGINE, "dsv4.engine", "dsv4.checkpoint"),
    "dsv4.checkpoint": (
        *ABOVE_THE_ENGINE,
        "dsv4.engine",
        "dsv4.model",
        "dsv4.layers",
        "dsv4.decode",
    ),
    "dsv4.step": (*ABOVE_THE_ENGINE, "dsv4.engine", "dsv4.checkpoint", "dsv4.decode"),
    "dsv4.decode": (*ABOVE_THE_ENGINE, "dsv4.engine", "dsv4.checkpoint"),
    "dsv4.engine": ABOVE_THE_ENGINE,
}

TOP_LEVEL_NAMES = {
    *(
        ".ci",
        ".gitattributes",
        ".gitignore",
        ".pre-commit-config.yaml",
        "LICENSE",
        "Makefile",
        "README.md",
        "docs",
    ),
    *("dsv4", "encoding", "pyproject.toml", "single_shot_inference.py", "tests"),
}
MUTABLE_CONSTRUCTORS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "deque",
    "Counter",
    "OrderedDict",
}
MUTATING_METHODS = {
    *(
        "append",
        "extend",
        "insert",
        "pop",
        "popitem",
        "remove",
        "clear",
        "update",
        "setdefault",
        "add",
        "discard",
    ),
    *("sort", "reverse", "appendleft", "popleft"),
}
FILE_READERS = {"read_text", "read_bytes", "mmap", "fromfile", "memmap", "safe_open", "load_file"}


class Source(NamedTuple):
    path: str
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @classmethod
    def parse(cls, path: str, text: str) -> "Source":
        tree = ast.parse(text, path)
        return cls(path, text, tree, tuple(ast.walk(tree)))

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


Rule = Callable[[Source], Iterator[tuple[int, str]]]


def read_sources() -> list[Source]:
    files = sorted(
        file for package in ("dsv4", "encoding") for file in (ROOT / package).rglob("*.py")
    )
    texts = [
        (file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files
    ]
    return [Source.parse(path, text) for path, text in texts]


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return read_sources()


def violations(sources: list[Source], rule: Rule, exceptions: tuple[str, ...] = ()) -> list[str]:
    checked = [source for source in sources if not source.path.startswith(exceptions)]
    return [
        f"{source.path}:{line}: {message}" for source in checked for line, message in rule(source)
    ]


def calls(source: Source) -> Iterator[tuple[ast.Call, str]]:
    """Every call with the last part of the called name."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node, node.func.id if isinstance(node.func, ast.Name) else node.func.attr


def prints(source: Source) -> Iterator[tuple[int, str]]:
    for call, _ in calls(source):
        if isinstance(call.func, ast.Name) and call.func.id == "print":
            yield call.lineno, "print"


def environment_reads(source: Source) -> Iterator[tuple[int, str]]:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for node in source.nodes:
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        ):
            if node.attr in names:
                yield node.lineno, f"os.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (
                (node.lineno, f"from os import {name.name}")
                for name in node.names
                if name.name in names
            )


def file_reads(source: Source) -> Iterator[tuple[int, str]]:
    for call, name in calls(source):
        if name in FILE_READERS or (isinstance(call.func, ast.Name) and name == "open"):
            yield call.lineno, f"reads a file ({name})"
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.argv":
            yield node.lineno, "sys.argv"
        elif isinstance(node, ast.Import) and any(name.name == "argparse" for name in node.names):
            yield node.lineno, "argparse"


def optional_state(source: Source) -> Iterator[tuple[int, str]]:
    for call, name in calls(source):
        if isinstance(call.func, ast.Name) and (
            name == "hasattr" or (name == "getattr" and len(call.args) > 2)
        ):
            yield call.lineno, f"{name} for optional state"


def broad_handlers(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = (
                []
                if node.type is None
                else node.type.elts
                if isinstance(node.type, ast.Tuple)
                else [node.type]
            )
            names = {ast.unparse(kind).rpartition(".")[2] for kind in caught}
            if not caught or names & {"Exception", "BaseException"}:
                yield node.lineno, "broad except"


def function_caches(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if re.match(r"(functools\.)?(lru_)?cache\b", ast.unparse(decorator)):
                    yield node.lineno, "a function cache is module state"


def module_state(source: Source) -> Iterator[tuple[int, str]]:
    """Mutable containers at module level: only as UPPER_CASE constants that nothing in the module
    changes.
    """
    constants = set()
    for node in source.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable_container(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                name = ast.unparse(target)
                if name != "__all__" and not name.isupper():
                    yield node.lineno, f"mutable module state: {name}"
                constants.add(name)
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"
        elif changed_name(node) in constants:
            yield node.lineno, f"changes the module constant {changed_name(node)}"  # type: ignore[attr-defined]


def is_mutable_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name | ast.Attribute):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CONSTRUCTORS
    return isinstance(
        value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    )


def changed_name(node: ast.AST) -> str | None:
    """The name whose contents this node changes in place, if any."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MUTATING_METHODS
    ):
        return ast.unparse(node.func.value)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return ast.unparse(node.value)
    return ast.unparse(node.target) if isinstance(node, ast.AugAssign) else None


def open_ends(source: Source) -> Iterator[tuple[int, str]]:
    for line, text in enumerate(source.text.splitlines(), 1):
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text):
            yield line, "open end"
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id == "NotImplementedError":
            yield node.lineno, "NotImplementedError"


def long_functions(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            length = node.end_lineno - body[0].lineno + 1 if body and node.end_lineno else 0
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def long_files(source: Source) -> Iterator[tuple[int, str]]:
    lines = len(source.text.splitlines())
    if lines > MAX_FILE_LINES:
        yield lines, f"{lines} lines, at most {MAX_FILE_LINES}"


def missing_docstrings(source: Source) -> Iterator[tuple[int, str]]:
    for node in (source.tree, *source.tree.body):
        if isinstance(node, ast.Module) and not node.body:
            continue
        if (
            isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is None
        ):
            name = "the module" if isinstance(node, ast.Module) else node.name
            if not name.startswith("_"):
                yield 1 if isinstance(node, ast.Module) else node.lineno, f"{name} has no docstring"


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from dsv4 import config` names a module as well as `from dsv4.config import
            # ModelConfig` does.
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)


def is_under(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{prefix}.") for prefix in prefixes)


def wrong_imports(source: Source) -> Iterator[tuple[int, str]]:
    for line, module in imported_modules(source):
        for prefix, allowed in IMPORTS_ONLY.items():
            concerned = is_under(source.module, (prefix,)) and is_under(module, ("dsv4",))
            if concerned and not is_under(module, (prefix, *allowed)):
                yield line, f"{prefix} must not import {module}"
        for prefix, forbidden in NEVER_IMPORTS.items():
            if is_under(source.module, (prefix,)) and is_under(module, forbidden):
                yield line, f"{prefix} must not import {module}"
        if source.module.startswith("encoding") and is_under(
            module, ("torch", "numpy", "transformers")
        ):
            yield line, f"encoding must not import {module}"


RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "only_command_line_modules_print": (prints, MAY_PRINT),
    "only_command_line_modules_and_kernel_loader_read_the_environment": (
        environment_reads,
        MAY_READ_ENVIRONMENT,
    ),
    "nothing_below_the_engine_reads_files_or_arguments": (file_reads, MAY_READ_FILES),
    "no_hasattr_or_getattr_with_default": (optional_state, ()),
    "no_broad_except": (broad_handlers, ()),
    "no_function_caches": (function_caches, MAY_CACHE),
    "no_mutable_module_state": (module_state, ()),
    "no_open_ends": (open_ends, ()),
    "functions_fit_a_screen": (long_functions, KERNELS),
    "files_are_small": (long_files, KERNELS),
    "public_names_have_docstrings": (missing_docstrings, ()),
    "dependencies_point_one_way": (wrong_imports, ()),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str, sources: list[Source]) -> None:
    rule, exceptions = RULES[name]
    assert violations(sources, rule, exceptions) == []


@pytest.mark.parametrize(
    ("name", "path", "text"),
    [
        ("only_command_line_modules_print", "dsv4/model.py", "print(1)"),
        (
            "only_command_line_modules_and_kernel_loader_read_the_environment",
            "dsv4/model.py",
            "os.environ['A']",
        ),
        (
            "only_command_line_modules_and_kernel_loader_read_the_environment",
            "dsv4/model.py",
            "from os import getenv",
        ),
        (
            "nothing_below_the_engine_reads_files_or_arguments",
            "dsv4/ops/norm/__init__.py",
            "Path('x').read_text()",
        ),
        ("nothing_below_the_engine_reads_files_or_arguments", "dsv4/model.py", "import argparse"),
        ("no_hasattr_or_getattr_with_default", "dsv4/model.py", "getattr(x, 'y', None)"),
        (
            "no_broad_except",
            "dsv4/model.py",
            "try:\n    f()\nexcept (OSError, Exception):\n    pass",
        ),
        ("no_broad_except", "dsv4/model.py", "try:\n    f()\nexcept:\n    pass"),
        (
            "no_function_caches",
            "dsv4/model.py",
            "@functools.lru_cache(maxsize=None)\ndef f(): pass",
        ),
        ("no_mutable_module_state", "dsv4/model.py", "state = {}"),
        (
            "no_mutable_module_state",
            "dsv4/model.py",
            "STATE = dict()\ndef f():\n    STATE['a'] = 1",
        ),
        ("no_mutable_module_state", "dsv4/model.py", "STATE = []\ndef f():\n    STATE.append(1)"),
        ("no_open_ends", "dsv4/model.py", "# " + "TO" + "DO: later"),
        ("functions_fit_a_screen", "dsv4/model.py", "def f():\n" + "    x = 1\n" * 61),
        ("files_are_small", "dsv4/model.py", "x = 1\n" * 401),
        ("public_names_have_docstrings", "dsv4/model.py", '"""Module."""\ndef f(): pass'),
        (
            "dependencies_point_one_way",
            "dsv4/ops/norm/__init__.py",
            "from dsv4.layers.norm import Norm",
        ),
        ("dependencies_point_one_way", "dsv4/ops/norm/__init__.py", "from dsv4 import model"),
        ("dependencies_point_one_way", "dsv4/layers/norm.py", "import dsv4.checkpoint.index"),
        ("dependencies_point_one_way", "dsv4/weights/quant.py", "from dsv4.ops import TORCH"),
        ("dependencies_point_one_way", "encoding/tokenizer.py", "import torch"),
        (
            "dependencies_point_one_way",
            "encoding/tokenizer.py",
            "from dsv4.errors import UserError",
        ),
    ],
)
def test_rule_finds_what_it_forbids(name: str, path: str, text: str) -> None:
    rule, exceptions = RULES[name]
    assert violations([Source.parse(path, text)], rule, exceptions) != []


def test_every_op_has_a_test_file(sources: list[Source]) -> None:
    paths = [Path(source.path) for source in sources]
    rooms = [path.parent.name for path in paths if path.match("dsv4/ops/*/__init__.py")]
    assert rooms
    assert [op for op in rooms if not (ROOT / f"tests/ops/{op}/test_{op}.py").is_file()] == []


def test_top_level_names_are_the_known_ones() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(
        [git, "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\n")
    assert {path.partition("/")[0] for path in tracked if path} - TOP_LEVEL_NAMES == set()


@pytest.mark.parametrize(
    ("name", "limit"),
    [("README.md", MAX_README_LINES), ("single_shot_inference.py", MAX_DRIVER_LINES)],
)
def test_front_page_and_driver_stay_short(name: str, limit: int) -> None:
    path = ROOT / name
    assert not path.is_file() or len(path.read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.slow
def test_importing_dsv4_touches_neither_cuda_nor_the_environment() -> None:
    # The libraries may read their own variables, so they are imported before the environment is
    # taken away.
    code = """
import os, numpy, safetensors.torch, tokenizers, torch
class Forbidden:
    def __getattribute__(self, name):
        raise AssertionError("import read the environment")
    __getitem__ = __setitem__ = __contains__ = __iter__ = __getattribute__
os.environ = os.environb = Forbidden()
import dsv4
assert not torch.cuda.is_initialized(), "import initialised CUDA"
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
