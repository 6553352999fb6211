"""Finds, by syntax, what makes the host wait for the device in the code that a decode step runs.

Such a line stalls an eager step and cannot be captured in a CUDA graph. Functions that run at load or capture are left
out by name, but not the functions inside them: what a capture defines is what a step runs. The scan needs no GPU and is
a commit gate; ``graph_readiness`` runs a step as well.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsv4.validate.tensor_expressions import Function, TensorExpressions, dotted, tensor_fields

ROOT = Path(__file__).parent.parent.parent
HOT_PATH = (
    *("dsv4/model.py", "dsv4/state.py", "dsv4/sampling.py", "dsv4/hand_off.py"),
    *("dsv4/layers/", "dsv4/decode/", "dsv4/launch/loader.py", "dsv4/weights/packed.py"),
    *("dsv4/ops/remembered.py", "dsv4/ops/tables.py"),
)
# The launchers of an operation: neither its torch reference nor its benchmark cases.
_LAUNCHER = re.compile(r"dsv4/ops/\w+/(?!__init__|bench|decode_plan)\w+\.py")
# Where the values are defined that the hot path works on.
_VALUES = ("dsv4/ops/", "dsv4/weights/", "dsv4/cache_rows.py", "dsv4/quant.py")
# Of a qualified name inside its module.
_LOAD_TIME = re.compile(
    r"\w+\.(build|dequantize|__init__|__post_init__)|(\w+\.)?_?(allocate|capture|captured|pack|unpack)(_\w+)?"
)

WHY = {
    "item": "copies a device value to the host",
    "cpu": "copies to the host",
    "tolist": "copies to the host",
    "numpy": "copies to the host",
    "to cpu": "copies to the host",
    "conversion": "copies a device value to the host",
    "formatting": "copies a device value to the host",
    "synchronize": "waits for the device",
    "comparison": "the host waits for the result",
    "branch": "the host must know a device value to go on",
    "data-dependent shape": "the host must know how many elements there are",
    "boolean index": "the host must know how many elements there are",
    "device value as size": "the host must know it to shape the result",
    "list index": "is copied from pageable memory, which waits",
    "tensor from Python data": "is copied from pageable memory, which waits",
    "stream or event per step": "is made once, by its owner",
    "empty_cache": "waits for the device and gives back memory that the next step needs",
    "print": "waits for what it shows",
    "environment": "is read at load, not in a step",
    "stale exemption": "excuses nothing",
}

_METHODS = {
    **{name: name for name in ("item", "cpu", "tolist", "numpy", "synchronize", "empty_cache")},
    **dict.fromkeys(("equal", "allclose", "is_nonzero"), "comparison"),
    **dict.fromkeys(("nonzero", "argwhere", "masked_select"), "data-dependent shape"),
    **dict.fromkeys(("unique", "unique_consecutive", "bincount"), "data-dependent shape"),
    **dict.fromkeys(("cuda", "new_tensor", "pin_memory"), "tensor from Python data"),
}
_FROM_PYTHON_DATA = {"torch.tensor", "torch.as_tensor", "torch.asarray", "torch.from_numpy"}
_PER_STEP = {"torch.Event", "torch.Stream", "torch.cuda.Event", "torch.cuda.ExternalStream", "torch.cuda.Stream"}
_CONVERSIONS = {
    *("all", "any", "bool", "complex", "float", "hash", "int", "max", "min", "operator.index", "range", "round"),
    "sorted",
}
_FORMATTING = {"ascii", "format", "repr", "str"}
# Tensor functions and methods whose integer arguments are sizes.
_SIZED = {
    *("arange", "as_strided", "empty", "expand", "full", "linspace", "narrow", "new_empty", "new_full", "new_ones"),
    *("new_zeros", "ones", "repeat", "reshape", "split", "unflatten", "view", "zeros"),
}


@dataclass(frozen=True)
class Finding:
    """One line that makes the host wait. ``function`` is its qualified name; ``pattern`` is a key of ``WHY``."""

    path: str
    line: int
    function: str
    pattern: str
    code: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.pattern} in {self.function}: `{self.code}` {WHY[self.pattern]}"


@dataclass(frozen=True)
class Exemption:
    """A deliberate exception: one pattern in one function."""

    function: str
    pattern: str
    reason: str


EXEMPTIONS = (
    Exemption("dsv4.launch.loader.cache_folder", "environment", "when a kernel is compiled, at its first use"),
    Exemption("dsv4.launch.loader._cuda_headers", "environment", "when a kernel is compiled, at its first use"),
    Exemption("dsv4.decode.choose._check", "comparison", "compares replayed with eager steps, once, at load"),
    Exemption("dsv4.decode.choose._check", "cpu", "ends the timing of a few steps, once, at load"),
    Exemption(
        "dsv4.decode.cuda_graph_decoder.CUDAGraphDecoder._synchronize", "synchronize", "before and after captures only"
    ),
    Exemption(
        "dsv4.decode.token_feed.TokenFeed.put",
        "synchronize",
        "pinned memory is written again only when its copy of four steps ago has been read",
    ),
    Exemption(
        "dsv4.decode.token_ring.TokenRing.read", "synchronize", "the caller asks for a token; later steps are queued"
    ),
    Exemption("dsv4.decode.token_ring.TokenRing.read", "conversion", "reads pinned memory of the host"),
)


def scan_tree(root: Path = ROOT, exemptions: Iterable[Exemption] = EXEMPTIONS) -> list[Finding]:
    """``scan`` of the checkout (or installation) at ``root``."""
    files = {file.relative_to(root).as_posix(): file for file in sorted((root / "dsv4").rglob("*.py"))}
    wanted = {path: file for path, file in files.items() if path.startswith((*HOT_PATH, *_VALUES))}
    return scan({path: file.read_text(encoding="utf-8") for path, file in wanted.items()}, exemptions)


def scan(sources: dict[str, str], exemptions: Iterable[Exemption] = ()) -> list[Finding]:
    """Findings in the sources (texts by path) of the hot path that are not exempted, and exemptions that match nothing.

    The other sources only tell which fields are tensors.
    """
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    fields = tensor_fields(trees.values())
    found = []
    for path, tree in trees.items():
        if path.startswith(HOT_PATH) or _LAUNCHER.fullmatch(path):
            found += _Scanner(path, fields | tensor_fields([tree])).scan(tree)
    excused = {(exemption.function, exemption.pattern) for exemption in exemptions}
    matched = {(finding.function, finding.pattern) for finding in found}
    stale = [Finding("EXEMPTIONS", 0, name, "stale exemption", pattern) for name, pattern in sorted(excused - matched)]
    return [finding for finding in found if (finding.function, finding.pattern) not in excused] + stale


class _Scanner(ast.NodeVisitor):
    """Walks one module and looks at function bodies, lambdas included."""

    def __init__(self, path: str, fields: frozenset[str]) -> None:
        self._path = path
        self._module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self._fields = fields
        self._scope: list[str] = []
        self._known: TensorExpressions | None = None
        self._hot = False
        self._found: list[Finding] = []

    def scan(self, tree: ast.Module) -> list[Finding]:
        self.visit(tree)
        return sorted(self._found, key=lambda finding: finding.line)

    def generic_visit(self, node: ast.AST) -> None:
        if self._hot and self._known is not None:
            for culprit, pattern in _suspects(node, self._known):
                self._report(culprit, pattern)
        super().generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        # Not the annotation, whose brackets are no index.
        for part in (node.target, node.value):
            if part is not None:
                self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node, node.name, node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._enter(node, node.name, node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._enter(node, "<lambda>", [node.body])

    def _enter(self, function: Function, name: str, body: list[ast.stmt] | list[ast.expr]) -> None:
        self._scope.append(name)
        outer = self._known, self._hot
        self._known = TensorExpressions(function, self._fields, self._known)
        self._hot = _LOAD_TIME.fullmatch(".".join(self._scope)) is None
        for node in body:
            self.visit(node)
        self._known, self._hot = outer
        self._scope.pop()

    def _report(self, node: ast.AST, pattern: str) -> None:
        code = ast.unparse(node).partition("\n")[0]
        shown = code if len(code) <= 60 else code[:57] + "..."
        function = ".".join((self._module, *self._scope))
        # A comprehension's clause has no line of its own.
        line = node.target.lineno if isinstance(node, ast.comprehension) else node.__dict__["lineno"]
        self._found.append(Finding(self._path, line, function, pattern, shown))


def _suspects(node: ast.AST, known: TensorExpressions) -> Iterator[tuple[ast.AST, str]]:
    """What is wrong with ``node`` itself, its children apart."""
    match node:
        case ast.Call():
            yield from ((node, pattern) for pattern in _of_call(node, known))
        case ast.Subscript():
            yield from ((node, pattern) for pattern in _of_index(node.slice, known))
        case ast.Attribute(attr="environ" | "environb", value=ast.Name(id="os")):
            yield node, "environment"
        case ast.FormattedValue(value=value) if known.is_tensor(value):
            yield value, "formatting"
        case ast.Compare() if len(node.ops) > 1 and known.is_tensor(node):
            yield node, "branch"
    yield from ((test, "branch") for test in _tests(node) if known.is_tensor(test))


def _tests(node: ast.AST) -> list[ast.expr]:
    """The expressions whose truth ``node`` asks for."""
    match node:
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
            return [node.test]
        case ast.BoolOp():
            return node.values
        case ast.UnaryOp(op=ast.Not()):
            return [node.operand]
        case ast.comprehension():
            return node.ifs
        case ast.match_case(guard=ast.expr() as guard):
            return [guard]
    return []


def _of_call(call: ast.Call, known: TensorExpressions) -> Iterator[str]:
    name = dotted(call.func)
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name in ("print", "breakpoint", "input"):
        yield "print"
    elif name in ("os.getenv", "getenv"):
        yield "environment"
    elif name in _PER_STEP:
        yield "stream or event per step"
    elif name in _FROM_PYTHON_DATA:
        if any(keyword.arg == "device" and not _is_cpu(keyword.value) for keyword in call.keywords):
            yield "tensor from Python data"
    elif name in _CONVERSIONS or name.startswith("math."):
        if any(map(known.is_tensor, arguments)):
            yield "conversion"
    elif name in _FORMATTING and any(map(known.is_tensor, arguments)):
        yield "formatting"
    elif name == "torch.where" and len(arguments) == 1:
        yield "data-dependent shape"
    elif isinstance(call.func, ast.Attribute):
        yield from _of_method(call, call.func, known)


def _of_method(call: ast.Call, method: ast.Attribute, known: TensorExpressions) -> Iterator[str]:
    """Of ``receiver.method(...)``, torch's functions included."""
    if method.attr in _METHODS:
        yield _METHODS[method.attr]
    elif method.attr == "to":
        targets = call.args[:1] + [keyword.value for keyword in call.keywords if keyword.arg == "device"]
        if any(map(_is_cpu, targets)):
            yield "to cpu"
        elif isinstance(method.value, ast.Call) and dotted(method.value.func) in _FROM_PYTHON_DATA:
            yield "tensor from Python data"
    elif method.attr == "repeat_interleave":
        sized = any(keyword.arg == "output_size" for keyword in call.keywords)
        if not sized and any(map(known.is_tensor, call.args[-1:])):
            yield "data-dependent shape"
    elif method.attr in _SIZED and any(map(known.is_tensor, call.args)):
        yield "device value as size"


def _of_index(index: ast.expr, known: TensorExpressions) -> Iterator[str]:
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    if any(map(known.is_boolean_tensor, parts)):
        yield "boolean index"
    if any(isinstance(part, ast.List) for part in parts):
        yield "list index"
    bounds = [bound for part in parts if isinstance(part, ast.Slice) for bound in (part.lower, part.upper, part.step)]
    if any(bound is not None and known.is_tensor(bound) for bound in bounds):
        yield "device value as size"


def _is_cpu(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and dotted(node.func) == "torch.device":
        return any(map(_is_cpu, node.args[:1]))
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cpu")
