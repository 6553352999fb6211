"""Finds every parameter of the config in a checkpoint and decides its format.

Names and declarations decide together. The stored dtype never decides; it is checked afterwards.
Nothing here reads tensor bytes.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4.checkpoint.declarations import Declaration, read_declaration
from dsv4.checkpoint.drafts import check_mtp, mtp_stages
from dsv4.checkpoint.formats import (
    ALL_COMPONENTS,
    COMPONENTS,
    MATRIX_DTYPES,
    PLAIN_DTYPES,
    can_be_halved,
    format_shown_by,
)
from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.names import Dialect, detect_dialect, from_native, to_native
from dsv4.checkpoint.problems import Problems, printable
from dsv4.checkpoint.shard import DTYPE_NAMES
from dsv4.checkpoint.uncollected import uncollected
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.weights.parameters import MtpKind, Parameter, Role, parameters
from dsv4.weights.quant import QuantFormat, packed_shapes

# Twelve times the largest release; a damaged config must not make the comparison run for minutes.
MAX_MATRICES = 10**6


@dataclass(frozen=True)
class Part:
    """The tensors that hold one part (data or a scale) of a parameter, by their names in the files.
    ``dtype``: what their elements are, E8M0 also where they are stored as plain bytes.

    One name, or one per expert; a ``fused`` one holds all experts. ``half`` is None, or 0 / 1 for
    the gate / up rows of a fused ``gate_up_proj``.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    fused: bool = False
    half: int | None = None


@dataclass(frozen=True)
class StoredParameter:
    """A parameter and where it lies: ``parts`` by "data", "block_scale", "global_scale",
    "input_scale".

    ``format`` is None for NORM, FLOAT and TABLE.
    """

    parameter: Parameter
    format: QuantFormat | None
    parts: dict[str, Part]
    nbytes: int

    @property
    def input_scale_bytes(self) -> int:
        """Of the activation scales, which are no part of the weight."""
        part = self.parts.get("input_scale")
        return 0 if part is None else len(part.names) * part.dtype.itemsize


def find_parameters(
    checkpoint: Checkpoint, config: ModelConfig, mtp: MtpKind | None = None
) -> list[StoredParameter]:
    """Every parameter of ``config`` (with ``mtp``, also of the speculative module) with its format
    and its tensors.

    Strict both ways. Raises one ``UserError`` that lists everything: damaged shards, missing and
    unexpected tensors, wrong shapes and dtypes, names that contradict the declared format. ``mtp``
    tensors not asked for are left out.
    """
    return _find(checkpoint, config, mtp, lambda name: not (mtp is None and _of_mtp(name)))


def find_draft(checkpoint: Checkpoint, config: ModelConfig, mtp: MtpKind) -> list[StoredParameter]:
    """The parameters of the speculative module alone, as ``find_parameters`` finds them; other
    tensors of the folder are not looked at, and need not be there.
    """
    return _find(checkpoint, config, mtp, _of_mtp)


# Embedding and head of a speculative module are the model's; a copy is not looked at.
_COPY_OF_THE_MODEL = re.compile(r"mtp\.\d+\.(emb|head\.weight$)")


def _of_mtp(name: str) -> bool:
    return name.startswith("mtp.")


@uncollected()
def _find(
    checkpoint: Checkpoint,
    config: ModelConfig,
    mtp: MtpKind | None,
    wanted: Callable[[str], bool],
) -> list[StoredParameter]:
    """The parameters whose names are ``wanted``, of tensors of which only those are compared."""
    # A folder of a speculative module alone shows no dialect: such names are the same in all.
    alone = mtp is not None and all(map(_of_mtp, checkpoint.names))
    dialect = Dialect.NATIVE if alone else detect_dialect(checkpoint.names, str(checkpoint.folder))
    if mtp is not None:
        check_mtp(checkpoint, config, mtp)
    finder = _Finder(checkpoint, dialect, read_declaration(checkpoint))
    stages = None if mtp is None else mtp_stages(checkpoint)
    listed = parameters(config, mtp, stages)
    expected = [parameter for name, parameter in listed.items() if wanted(name)]
    matrices = sum(
        parameter.shape[0] if parameter.role is Role.EXPERT else 1 for parameter in expected
    )
    if matrices > MAX_MATRICES:
        raise UserError(
            f"{checkpoint.folder}/config.json: found {matrices} matrices, "
            f"expected at most {MAX_MATRICES}"
        )
    found = [finder.find(parameter) for parameter in expected]
    finder.report_unexpected(wanted)
    finder.problems.raise_if_any(str(checkpoint.folder))
    return found


class _Finder:
    """One comparison of a checkpoint with the parameter list; remembers the tensors in use and the
    problems.
    """

    def __init__(self, checkpoint: Checkpoint, dialect: Dialect, declaration: Declaration) -> None:
        self.checkpoint = checkpoint
        self.dialect = dialect
        self.declaration = declaration
        self.problems = Problems()
        self.problems.extend(checkpoint.problems)
        self.stored = self._names_in_files()
        self.unused = dict(self.stored)

    def _names_in_files(self) -> dict[str, str]:
        """The names in the files by native name; reports names without a native form and two names
        for one tensor.
        """
        stored: dict[str, str] = {}
        for name in self.checkpoint.names:
            native = to_native(name, self.dialect)
            if native is None:
                self.problems.add("unexpected", printable(name))
            elif native in stored:
                self.problems.add(
                    "present twice", f"{printable(name)} and {printable(stored[native])}"
                )
            else:
                stored[native] = name
        return stored

    def report_unexpected(self, wanted: Callable[[str], bool]) -> None:
        for native, name in self.unused.items():
            if wanted(native) and not _COPY_OF_THE_MODEL.match(native):
                self.problems.add("unexpected", printable(name))

    def find(self, parameter: Parameter) -> StoredParameter:
        if parameter.role in PLAIN_DTYPES:
            names, dtype = self._check(
                (parameter.name,), parameter.shape, PLAIN_DTYPES[parameter.role]
            )
            size = {Role.FLOAT: 4, Role.TABLE: 8}.get(parameter.role, dtype.itemsize)
            return StoredParameter(
                parameter, None, {"data": Part(names, dtype)}, math.prod(parameter.shape) * size
            )
        place = self._place(parameter)
        format = self._format(parameter, place.modules[0])
        try:
            shapes = packed_shapes(format, parameter.shape)
        except ValueError as error:
            raise UserError(f"{self.checkpoint.folder}: {parameter.name}: {error}") from None
        if place.half is not None and not can_be_halved(format, parameter.shape):
            found = f"{place.modules[0]} ({format.value})"
            self.problems.add("in a format not supported for fused experts", found)
            for component in ALL_COMPONENTS:
                self.unused.pop(f"{place.modules[0]}.{component}", None)
            return StoredParameter(parameter, format, {}, 0)
        parts = self._parts(parameter, place, format)
        sizes = {name: math.prod(shape) for name, shape in shapes.items() if shape is not None}
        nbytes = sum(size * parts[name].dtype.itemsize for name, size in sizes.items())
        return StoredParameter(parameter, format, parts, nbytes)

    def _place(self, parameter: Parameter) -> "_Place":
        module = parameter.name.removesuffix(".weight")
        if parameter.role is not Role.EXPERT:
            return _Place((module,))
        prefix, _, projection = module.rpartition(".")
        if projection in ("w1", "w3") and f"{prefix}.w13.weight" in self.stored:
            return _Place((f"{prefix}.w13",), fused=True, half=0 if projection == "w1" else 1)
        if projection == "w2" and f"{module}.weight" in self.stored:
            return _Place((module,), fused=True)
        return _Place(
            tuple(f"{prefix}.{expert}.{projection}" for expert in range(parameter.shape[0]))
        )

    def _format(self, parameter: Parameter, module: str) -> QuantFormat:
        allowed = self.declaration.allowed(parameter, self.dialect)
        present = {
            component for component in ALL_COMPONENTS if f"{module}.{component}" in self.stored
        }
        admitted = [
            format
            for format in allowed
            if present - {"input_scale"} == set(COMPONENTS[format].values())
        ]
        stored = self.checkpoint.tensors.get(self.stored.get(f"{module}.weight", ""))
        dtype = None if stored is None else stored.dtype
        if len(admitted) > 1:
            return QuantFormat.F32 if dtype is torch.float32 else QuantFormat.BF16
        if admitted:
            return admitted[0]
        shown = format_shown_by(present, dtype)
        if shown is None:
            return allowed[0]
        expected = "/".join(format.value for format in allowed)
        self.problems.add(
            "not in the declared format", f"{module} (found {shown[0]}, declared {expected})"
        )
        return shown[1]

    def _parts(self, parameter: Parameter, place: "_Place", format: QuantFormat) -> dict[str, Part]:
        components = dict(COMPONENTS[format])
        if f"{place.modules[0]}.input_scale" in self.stored and format is QuantFormat.NVFP4:
            components["input_scale"] = "input_scale"
        one_each = parameter.role is Role.EXPERT and not place.fused
        shapes = packed_shapes(format, parameter.shape[1:] if one_each else parameter.shape)
        shapes["input_scale"] = ()
        parts = {}
        for part, component in components.items():
            shape = shapes[part]
            assert shape is not None
            if place.half is not None:
                shape = (shape[0], 2 * shape[1], *shape[2:])
            names, dtype = self._check(
                tuple(f"{module}.{component}" for module in place.modules),
                shape,
                MATRIX_DTYPES[format, part],
            )
            if part == "block_scale" and dtype is torch.uint8:
                dtype = torch.float8_e8m0fnu
            parts[part] = Part(names, dtype, place.fused, place.half)
        return parts

    def _check(
        self, natives: tuple[str, ...], shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
    ) -> tuple[tuple[str, ...], torch.dtype]:
        """Names in the files and the dtype all tensors of a part share; what does not fit goes to
        ``problems``.
        """
        names = []
        for native in natives:
            self.unused.pop(native, None)
            name = self.stored.get(native)
            if name is None:
                self.problems.add("missing", from_native(native, self.dialect))
                continue
            names.append(name)
            stored = self.checkpoint.tensors.get(name)
            if stored is None:
                continue
            # A scalar may be stored as [] or [1] (model.md#nvfp4).
            if stored.shape != shape and not (shape == () and stored.shape == (1,)):
                self.problems.add(
                    "of wrong shape", f"{name} (found {list(stored.shape)}, expected {list(shape)})"
                )
            if stored.dtype in dtypes:
                dtypes = (stored.dtype,)
            else:
                expected = " or ".join(DTYPE_NAMES[dtype] for dtype in dtypes)
                self.problems.add(
                    "of wrong dtype",
                    f"{name} (found {DTYPE_NAMES[stored.dtype]}, expected {expected})",
                )
        return tuple(names), dtypes[0]


@dataclass(frozen=True)
class _Place:
    """Native modules that store a parameter: one, or one per expert; see ``Part`` for ``fused`` and
    ``half``.
    """

    modules: tuple[str, ...]
    fused: bool = False
    half: int | None = None
