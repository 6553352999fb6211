"""How the code is written: rules of docs/contributing.md on single statements, functions, files."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.source_rules import Rule, Source, calls, violations

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
CUTEDSL = "dsv4/ops/linear/cutedsl/"
KERNELS = ("dsv4/launch/", CUTEDSL, "dsv4/ops/linear/decode_plan.py")
# The published interface of the encoder, and kernels, whose parameters are what they are launched
# with.
MANY_PARAMETERS = {("encoding/deepseek_v4_encoding.py", "encode_messages")}
# Functions of as many tensors as are noted with them; torch.compile's result has no signature.
ANY_NUMBER_OF_TENSORS = ("dsv4/launch/items.py", "dsv4/demo/training/fast_forward.py")
MAY_HAVE_MANY_PARAMETERS = (CUTEDSL, "dsv4/demo/training/sinkhorn.py")
MAY_TAKE_THE_DEFAULT_DTYPE = ("dsv4/bench/", "dsv4/demo/", "dsv4/measure/", "dsv4/validate/")
FLOAT_FACTORIES = {"tensor", "empty", "zeros", "ones", "full", "rand", "randn", "eye", "linspace"}
MAPPING_WRITES = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"}
ENVIRONMENTS = {"os.environ", "os.environb", "environ", "environb"}


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


def changed_mappings(source: Source) -> Iterator[tuple[int, str]]:
    """What is written as a mapping: an item, or by a method or an operator that changes it; and
    what is replaced as a whole.
    """
    for node in source.nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.lineno, ast.unparse(node.value)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(
            node.ctx, ast.Store | ast.Del
        ):
            yield node.lineno, ast.unparse(node)
    for call, name in calls(source):
        if name in MAPPING_WRITES and isinstance(call.func, ast.Attribute):
            yield call.lineno, ast.unparse(call.func.value)


def environment_writes(source: Source) -> Iterator[tuple[int, str]]:
    for line, changed in changed_mappings(source):
        if changed in ENVIRONMENTS:
            yield line, f"writes {changed}"
    for call, name in calls(source):
        if name in ("putenv", "unsetenv"):
            yield call.lineno, name


def namespace_writes(source: Source) -> Iterator[tuple[int, str]]:
    for line, changed in changed_mappings(source):
        if re.search(r"(^(vars|globals|locals)\(.*\)|\b__dict__)$", changed):
            yield line, f"writes {changed}"


def starred_literals(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Starred) and isinstance(
                    argument.value, ast.Tuple | ast.List
                ):
                    yield argument.lineno, f"starred literal {ast.unparse(argument)}"


def several_assignments(source: Source) -> Iterator[tuple[int, str]]:
    """Statements that assign more than one value; unpacking one value is not among them."""
    for node in source.nodes:
        if isinstance(node, ast.Assign):
            written = isinstance(node.value, ast.Tuple | ast.List) and not any(
                isinstance(element, ast.Starred) for element in node.value.elts
            )
            unpacks = any(isinstance(target, ast.Tuple | ast.List) for target in node.targets)
            if len(node.targets) > 1 or (written and unpacks):
                yield node.lineno, f"several assignments: {ast.unparse(node)[:60]}"


def many_parameters(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            count = sum(parameter.arg not in ("self", "cls") for parameter in found)
            if count > MAX_PARAMETERS and (source.path, node.name) not in MANY_PARAMETERS:
                yield node.lineno, f"{node.name} has {count} parameters, at most {MAX_PARAMETERS}"


def unnamed_signatures(source: Source) -> Iterator[tuple[int, str]]:
    """Fields of dataclasses and named tuples that take any arguments."""
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            made = " ".join(ast.unparse(part) for part in (*node.decorator_list, *node.bases))
            if re.search(r"\b(dataclass|NamedTuple)\b", made):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and re.search(
                        r"\bCallable\[\.\.\.,", ast.unparse(field.annotation)
                    ):
                        yield field.lineno, f"{ast.unparse(field)}: name the signature"


def tensors_of_the_default_dtype(source: Source) -> Iterator[tuple[int, str]]:
    """New tensors without a dtype: theirs is what the caller's process has as its default."""
    if source.path.rpartition("/")[2].startswith("bench"):
        return
    for call, name in calls(source):
        new = name in FLOAT_FACTORIES and ast.unparse(call.func) == f"torch.{name}"
        if new and not any(keyword.arg == "dtype" for keyword in call.keywords):
            yield call.lineno, f"torch.{name} without dtype"


RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "no_hasattr_or_getattr_with_default": (optional_state, ()),
    "no_broad_except": (broad_handlers, ()),
    "no_open_ends": (open_ends, ()),
    "functions_fit_a_screen": (long_functions, KERNELS),
    "files_are_small": (long_files, (CUTEDSL,)),
    "public_names_have_docstrings": (missing_docstrings, ()),
    "nothing_writes_the_environment": (environment_writes, ()),
    "nothing_writes_a_namespace_as_a_mapping": (namespace_writes, ()),
    "no_starred_literals_in_calls": (starred_literals, ()),
    "one_assignment_per_statement": (several_assignments, ()),
    "functions_have_few_parameters": (many_parameters, MAY_HAVE_MANY_PARAMETERS),
    "callable_fields_name_their_signature": (unnamed_signatures, ANY_NUMBER_OF_TENSORS),
    "new_tensors_name_their_dtype": (tensors_of_the_default_dtype, MAY_TAKE_THE_DEFAULT_DTYPE),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    rule, exceptions = RULES[name]
    assert violations(rule, exceptions) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_hasattr_or_getattr_with_default", "getattr(x, 'y', None)"),
        ("no_hasattr_or_getattr_with_default", "hasattr(x, 'y')"),
        ("no_broad_except", "try:\n    f()\nexcept (OSError, Exception):\n    pass"),
        ("no_broad_except", "try:\n    f()\nexcept:\n    pass"),
        ("no_open_ends", "# " + "TO" + "DO: later"),
        ("functions_fit_a_screen", "def f():\n" + "    x = 1\n" * 61),
        ("files_are_small", "x = 1\n" * 301),
        ("public_names_have_docstrings", '"""Module."""\ndef f(): pass'),
        ("nothing_writes_the_environment", "os.environ['A'] = 'b'"),
        ("nothing_writes_the_environment", "del environ['A']"),
        ("nothing_writes_the_environment", "os.environ |= {'A': 'b'}"),
        ("nothing_writes_the_environment", "os.environ = {}"),
        ("nothing_writes_the_environment", "os.environ.setdefault('A', 'b')"),
        ("nothing_writes_the_environment", "os.putenv('A', 'b')"),
        ("nothing_writes_a_namespace_as_a_mapping", "vars(x)['a'] = 1"),
        ("nothing_writes_a_namespace_as_a_mapping", "vars(f(x))['a'] += 1"),
        ("nothing_writes_a_namespace_as_a_mapping", "self.__dict__['a'] = 1"),
        ("nothing_writes_a_namespace_as_a_mapping", "x.__dict__.update(a=1)"),
        ("nothing_writes_a_namespace_as_a_mapping", "x.__dict__ = {}"),
        ("nothing_writes_a_namespace_as_a_mapping", "globals()['a'] = 1"),
        ("no_starred_literals_in_calls", "f(*(a, b))"),
        ("no_starred_literals_in_calls", "f(c, *[a, b])"),
        ("one_assignment_per_statement", "a, b = x, y"),
        ("one_assignment_per_statement", "(a, (b, c)) = x, y"),
        ("one_assignment_per_statement", "[a, b] = [x, y]"),
        ("one_assignment_per_statement", "a = b = x"),
        ("functions_have_few_parameters", "def f(a, b, c, d, e, f, g, h): pass"),
        ("functions_have_few_parameters", "def f(self, a, b, c, d, /, e, *, f, g, h): pass"),
        (
            "callable_fields_name_their_signature",
            "@dataclass(frozen=True)\nclass A:\n    f: Callable[..., int] | None = None",
        ),
        ("callable_fields_name_their_signature", "class A(NamedTuple):\n    f: Callable[..., int]"),
        ("new_tensors_name_their_dtype", "torch.zeros(3, device=device)"),
    ],
)
def test_rule_finds_what_it_forbids(name: str, text: str) -> None:
    rule, exceptions = RULES[name]
    assert violations(rule, exceptions, (Source.parse("dsv4/model.py", text),)) != []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothing_writes_the_environment", "a = os.environ['A']; b = {**os.environ}"),
        ("nothing_writes_a_namespace_as_a_mapping", "a = self.__dict__[field]; b = vars(x)"),
        ("no_starred_literals_in_calls", "f(*a, (b, c))"),
        ("one_assignment_per_statement", "a, b = x; c, *d = *x, y; e, (f, g) = h(); i = x, y"),
        ("functions_have_few_parameters", "def f(self, a, b, c, d, e, f, *, g): pass"),
        ("callable_fields_name_their_signature", "@dataclass\nclass A:\n    f: Callable[[], int]"),
    ],
)
def test_rule_leaves_alone_what_it_does_not_forbid(name: str, text: str) -> None:
    rule, exceptions = RULES[name]
    assert violations(rule, exceptions, (Source.parse("dsv4/model.py", text),)) == []
