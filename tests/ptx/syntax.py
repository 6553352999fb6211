"""What PTX text consists of: instructions, their operands, variables and functions."""

from typing import NamedTuple


class Register(NamedTuple):
    """A virtual register; ``name`` is unique in its function."""

    name: str


class Immediate(NamedTuple):
    """A number as it is written: an integer, or the bit pattern of a floating-point constant."""

    bits: int


class Special(NamedTuple):
    """A read-only register such as %tid.x."""

    name: str


class Symbol(NamedTuple):
    """The address of a parameter or a variable."""

    name: str


class Vector(NamedTuple):
    """Several operands in braces."""

    items: tuple["Operand", ...]


class Pair(NamedTuple):
    """Two results, written a|b."""

    first: "Operand"
    second: "Operand"


class Address(NamedTuple):
    """[base + offset]."""

    base: "Operand"
    offset: int


class TensorAddress(NamedTuple):
    """[tensor map, {coordinates}]."""

    map: "Operand"
    coordinates: tuple["Operand", ...]


class Label(NamedTuple):
    """The target of a branch."""

    name: str


class Negated(NamedTuple):
    """The opposite of a predicate, written !p."""

    register: Register


class Nothing(NamedTuple):
    """A result that is thrown away."""


Operand = (
    Register
    | Immediate
    | Special
    | Symbol
    | Vector
    | Pair
    | Address
    | TensorAddress
    | Label
    | Negated
    | Nothing
)


class Instruction(NamedTuple):
    """One instruction; ``parts`` is ``opcode`` between its dots."""

    text: str
    opcode: str
    parts: tuple[str, ...]
    guard: Register | None
    negated: bool
    operands: tuple[Operand, ...]


class Variable(NamedTuple):
    """A variable of the module or a function: ``size`` 0 where the launch decides."""

    name: str
    space: str
    align: int
    size: int
    content: bytes


class Function(NamedTuple):
    """An entry function. ``parameters`` are (name, bytes), ``registers`` their types by name."""

    name: str
    directives: dict[str, tuple[int, ...]]
    parameters: tuple[tuple[str, int], ...]
    variables: tuple[Variable, ...]
    registers: dict[str, str]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def registers_in(operands: tuple[Operand, ...]) -> frozenset[Register]:
    """Every register that the operands name."""
    found: set[Register] = set()
    for operand in operands:
        if isinstance(operand, Register):
            found.add(operand)
        elif isinstance(operand, Address):
            found |= registers_in((operand.base,))
        elif isinstance(operand, Vector):
            found |= registers_in(operand.items)
        elif isinstance(operand, Pair):
            found |= registers_in((operand.first, operand.second))
        elif isinstance(operand, TensorAddress):
            found |= registers_in((operand.map, *operand.coordinates))
        elif isinstance(operand, Negated):
            found.add(operand.register)
    return frozenset(found)
