"""The structural rules of docs/contributing.md: what a module may import, read, print and keep."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.source_rules import DRIVER, Rule, Source, calls, imported_modules, violations

COMMAND_LINE = (
    *(DRIVER, "dsv4/__main__.py", "dsv4/cli/", "dsv4/command/", "dsv4/serve/"),
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
OF_THE_PROCESS = ("dsv4/turns.py",)  # Whose engines share devices and know of no other one.
MAY_READ_FILES = (
    *COMMAND_LINE,
    *KERNELS,
    "dsv4/checkpoint/",
    "dsv4/json_object.py",
    "dsv4/native/",
    "dsv4/plan.py",
    "encoding/",
)
LEAVES = (
    *("dsv4.config", "dsv4.config_dialects"),
    *("dsv4.engine_config", "dsv4.limits"),
    *("dsv4.errors", "dsv4.progress", "dsv4.replaced_file", "dsv4.json_object"),
    "dsv4.limited_process",
    *("dsv4.model_files", "dsv4.peers", "dsv4.channels", "dsv4.turns"),
    *("dsv4.on_failure", "dsv4.stream_barrier", "dsv4.integers"),
)
HIGHEST = ("dsv4.cli", "dsv4.serve", "dsv4.demo", "dsv4.validate", "dsv4.bench", "dsv4.measure")
ABOVE_THE_ENGINE = (*HIGHEST, "dsv4.command")
ABOVE_THE_MODEL = (
    *ABOVE_THE_ENGINE,
    "dsv4.engine",
    "dsv4.checkpoint",
    "dsv4.decode",
    "dsv4.step",
    "dsv4.sampling",
)
# Everything else imports dsv4.encoding: the current directory may hold another folder encoding/.
FINDS_ENCODING = ("dsv4/encoding.py",)
# Not in the wheel, so that only it may import itself.
WITHOUT_WHEEL = ("dsv4.demo.training",)
# A module under the prefix imports nothing of dsv4 except itself and the listed prefixes ...
IMPORTS_ONLY = {
    **dict.fromkeys(LEAVES, LEAVES),
    "dsv4.parallel.hand_off": (),
    "dsv4.weights": LEAVES,
    "dsv4.caches": (*LEAVES, "dsv4.weights"),
    "dsv4.command": LEAVES,
    "dsv4.launch": (*LEAVES, "dsv4.weights"),
    "dsv4.ops": (*LEAVES, "dsv4.weights", "dsv4.caches", "dsv4.launch"),
    "dsv4.native": (*LEAVES, "dsv4.weights", "dsv4.caches", "dsv4.launch", "dsv4.ops"),
    "encoding": (),
}
# ... or nothing of the listed prefixes.
NEVER_IMPORTS = {
    "dsv4.layers": (*ABOVE_THE_MODEL, "dsv4.model"),
    "dsv4.model": ABOVE_THE_MODEL,
    "dsv4.parallel": (*ABOVE_THE_MODEL, "dsv4.model"),
    "dsv4.sampling": (*ABOVE_THE_ENGINE, "dsv4.engine", "dsv4.checkpoint"),
    # Of it dsv4.command may be imported: export is a command.
    "dsv4.checkpoint": (*HIGHEST, "dsv4.engine", "dsv4.model", "dsv4.layers", "dsv4.decode"),
    "dsv4.step": (*ABOVE_THE_ENGINE, "dsv4.engine", "dsv4.checkpoint", "dsv4.decode"),
    "dsv4.decode": (*ABOVE_THE_ENGINE, "dsv4.engine", "dsv4.checkpoint"),
    "dsv4.speculative": (*ABOVE_THE_ENGINE, "dsv4.engine", "dsv4.checkpoint", "dsv4.decode"),
    "dsv4.engine": ABOVE_THE_ENGINE,
    # The driver needs nothing of the server, nor its libraries.
    "dsv4.cli": ("dsv4.serve",),
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
        if is_under(module, WITHOUT_WHEEL) and not is_under(source.module, WITHOUT_WHEEL):
            yield line, f"the wheel does not hold {module}"
        if source.module.startswith("encoding") and is_under(
            module, ("torch", "numpy", "transformers")
        ):
            yield line, f"encoding must not import {module}"
        if is_under(module, ("encoding",)) and source.path not in FINDS_ENCODING:
            yield line, f"a checkpoint's folder could take the place of {module}"


RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "only_command_line_modules_print": (prints, MAY_PRINT),
    "only_command_line_modules_and_kernel_loader_read_the_environment": (
        environment_reads,
        MAY_READ_ENVIRONMENT,
    ),
    "nothing_below_the_engine_reads_files_or_arguments": (file_reads, MAY_READ_FILES),
    "no_function_caches": (function_caches, MAY_CACHE),
    "no_mutable_module_state": (module_state, OF_THE_PROCESS),
    "dependencies_point_one_way": (wrong_imports, ()),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    rule, exceptions = RULES[name]
    assert violations(rule, exceptions) == []


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
        (
            "dependencies_point_one_way",
            "dsv4/ops/norm/__init__.py",
            "from dsv4.layers.norm import Norm",
        ),
        ("dependencies_point_one_way", "dsv4/ops/norm/__init__.py", "from dsv4 import model"),
        ("dependencies_point_one_way", "dsv4/layers/norm.py", "import dsv4.checkpoint.index"),
        ("dependencies_point_one_way", "dsv4/weights/quant.py", "from dsv4.ops import TORCH"),
        ("dependencies_point_one_way", "encoding/tokenizer.py", "import torch"),
        ("dependencies_point_one_way", "dsv4/bench/ops.py", "from dsv4.demo.training import train"),
        (
            "dependencies_point_one_way",
            "encoding/tokenizer.py",
            "from dsv4.errors import UserError",
        ),
        ("dependencies_point_one_way", "dsv4/cli/prompt.py", "from encoding import Tokenizer"),
        ("dependencies_point_one_way", "encoding/render.py", "from encoding import Tokenizer"),
    ],
)
def test_rule_finds_what_it_forbids(name: str, path: str, text: str) -> None:
    rule, exceptions = RULES[name]
    assert violations(rule, exceptions, (Source.parse(path, text),)) != []
