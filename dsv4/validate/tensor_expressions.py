"""Which expressions are tensors, as far as the syntax of one function tells.

It tells by annotations, the dimension key and torch's own functions and methods. What cannot be told counts as no
tensor, so the scanner that asks (``sync_scan``) has gaps and few false alarms; running a step (``graph_readiness``)
closes the gaps.
"""

import ast
import re
from collections.abc import Iterable, Iterator

# ``q_THD``, ``position_1``: the dimension key of ``dsv4/__init__.py``.
_DIMENSION_SUFFIX = re.compile(r"[a-z][a-z0-9_]*_(?:[A-Z]+|1)")
# Methods that only tensors have here, and of those the ones whose result is one boolean or number on the device.
_REDUCTIONS = {"all", "amax", "amin", "any", "argmax", "argmin", "max", "min", "sum"}
_BOOLEAN_METHODS = {
    *("all", "any", "eq", "ge", "gt", "isclose", "isfinite", "isin", "isinf", "isnan", "le", "lt", "ne", "signbit"),
    *("logical_and", "logical_not", "logical_or", "logical_xor", "bool"),
}
# What a tensor answers from its shape and layout, without looking at the device.
_HOST_METHODS = {
    *("data_ptr", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_pinned"),
    *("is_shared", "item", "nelement", "numel", "numpy", "size", "storage_offset", "stride", "tolist", "type"),
}
_HOST_FUNCTIONS = {
    *("Generator", "Size", "allclose", "can_cast", "compile", "device", "dtype", "enable_grad", "equal", "finfo"),
    *("iinfo", "inference_mode", "manual_seed", "no_grad", "numel", "promote_types", "result_type", "typename"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a chain of names; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def tensor_fields(trees: Iterable[ast.Module]) -> frozenset[str]:
    """Names of fields, properties and attributes that are tensors in every class of ``trees`` that has them."""
    tensors, others = set(), set()
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for member in [member for node in classes for member in node.body]:
        for name, is_tensor in _members(member):
            (tensors if is_tensor else others).add(name)
    return frozenset(tensors - others)


class TensorExpressions:
    """What is known inside one function. ``outer`` is the function around it, whose names it sees."""

    def __init__(self, function: Function, fields: frozenset[str], outer: "TensorExpressions | None" = None) -> None:
        self._fields = fields
        self._tensors: set[str] = set() if outer is None else set(outer._tensors)
        self._booleans: set[str] = set() if outer is None else set(outer._booleans)
        arguments = function.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation is not None and _is_tensor_type(argument.annotation):
                self._tensors.add(argument.arg)
        # Twice, because the walk goes level by level: a name may be used before it is learnt.
        for node in [*ast.walk(function)] * 2:
            self._learn(node)

    def is_tensor(self, node: ast.expr) -> bool:
        """Whether ``node`` evaluates to a tensor."""
        match node:
            case ast.Name(id=name):
                return name in self._tensors or _has_dimensions(name)
            case ast.Attribute(attr=name):
                return (
                    name in self._fields
                    or _has_dimensions(name)
                    or (name in ("T", "mT") and self.is_tensor(node.value))
                )
            case ast.Call():
                return self._returns_tensor(node)
            case ast.BinOp():
                return self.is_tensor(node.left) or self.is_tensor(node.right)
            case ast.UnaryOp():
                return not isinstance(node.op, ast.Not) and self.is_tensor(node.operand)
            case ast.Compare():
                identity = all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
                return not identity and any(map(self.is_tensor, (node.left, *node.comparators)))
            case ast.Subscript() | ast.Starred():
                return self.is_tensor(node.value)
            case ast.IfExp():
                return self.is_tensor(node.body) or self.is_tensor(node.orelse)
            case ast.NamedExpr():
                return self.is_tensor(node.value)
        return False

    def is_boolean_tensor(self, node: ast.expr) -> bool:
        """Whether ``node`` evaluates to a tensor of booleans, which as an index selects a number of elements that only
        the device knows.
        """
        match node:
            case ast.Name(id=name):
                return name in self._booleans or name == "mask" or name.endswith("_mask")
            case ast.Compare():
                return self.is_tensor(node)
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.BitXor()):
                return self.is_boolean_tensor(node.left) or self.is_boolean_tensor(node.right)
            case ast.UnaryOp(op=ast.Invert()):
                return self.is_boolean_tensor(node.operand)
            case ast.Call(func=ast.Attribute(attr=name)):
                return name in _BOOLEAN_METHODS and self.is_tensor(node)
            case ast.Tuple():
                return any(map(self.is_boolean_tensor, node.elts))
        return False

    def _returns_tensor(self, call: ast.Call) -> bool:
        module, _, name = dotted(call.func).rpartition(".")
        if module == "torch":
            return name not in _HOST_FUNCTIONS and not name.startswith(("get_", "is_", "set_"))
        if module in ("torch.nn.functional", "torch.linalg", "torch.special"):
            return True
        if isinstance(call.func, ast.Attribute) and not module.startswith("torch."):
            found = call.func.attr in _REDUCTIONS and not module.startswith("math")
            return found or (self.is_tensor(call.func.value) and call.func.attr not in _HOST_METHODS)
        return False

    def _learn(self, node: ast.AST) -> None:
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, node.value)
            case ast.NamedExpr():
                self._bind(node.target, node.value)
            case ast.AnnAssign(target=ast.Name(id=name)):
                if _is_tensor_type(node.annotation):
                    self._tensors.add(name)
            case ast.For() | ast.comprehension():
                self._bind(node.target, node.iter)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            pairs = list(zip(target.elts, value.elts, strict=False))
        for part, source in pairs:
            for name in _names(part):
                if self.is_tensor(source):
                    self._tensors.add(name)
                if self.is_boolean_tensor(source):
                    self._booleans.add(name)


def _members(node: ast.stmt) -> Iterator[tuple[str, bool]]:
    """What one statement of a class adds to its instances: (name, whether it is a tensor)."""
    match node:
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name, _is_tensor_type(node.annotation)
        case ast.FunctionDef(name="__init__" | "__post_init__"):
            known = TensorExpressions(node, frozenset())
            for part in ast.walk(node):
                match part:
                    case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                        yield name, known.is_tensor(value)
        case ast.FunctionDef():
            yield node.name, node.returns is not None and _is_tensor_type(node.returns)


def _has_dimensions(name: str) -> bool:
    return _DIMENSION_SUFFIX.fullmatch(name) is not None


def _is_tensor_type(annotation: ast.expr) -> bool:
    """``Tensor``, ``torch.Tensor`` or one of them or None; a list of tensors is none."""
    kinds = {kind.strip() for kind in ast.unparse(annotation).strip("'\"").split("|")} - {"None"}
    return bool(kinds) and kinds <= {"Tensor", "torch.Tensor"}


def _names(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
