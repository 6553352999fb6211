"""Stretches of instructions in which lanes only compute, each as one Python function.

Nobody sees inside a stretch: no other warp, no copy, no diverged lane of the same warp. So it is
executed as a whole, without what has to be looked at between two instructions.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.rows import Array, Mask, Place, Row, RowStore
from tests.ptx.scalar import InPlace, Lanewise, unchanged
from tests.ptx.syntax import Register

if TYPE_CHECKING:
    from tests.ptx.program import Step
    from tests.ptx.warp import Warp


class Stretch:
    """Lanewise instructions, none of which but the first is the target of a branch."""

    def __init__(self, steps: "Sequence[Step]"):
        self.steps = steps
        self.count = len(steps)

    def run(self, warp: "Warp", mask: Mask) -> None:
        """Executes all of it in the lanes of the mask."""
        rows = warp.stretches.get(self)
        if rows is None:
            rows = warp.stretches[self] = [warp.rows[place] for place in self._text.places]
        if mask is True:
            self._of_all(warp, rows)
        else:
            self._of_some(warp, rows, mask)

    @functools.cached_property
    def registers(self) -> frozenset[Register]:
        """All that it reads or writes."""
        return frozenset[Register]().union(*(step.sets | step.uses for step in self.steps))

    @functools.cached_property
    def _text(self) -> "_Text":
        return _Text(self.steps)

    @functools.cached_property
    def _of_all(self) -> Callable[..., None]:
        return self._text.function(masked=False)

    @functools.cached_property
    def _of_some(self) -> Callable[..., None]:
        return self._text.function(masked=True)


def find_stretches(steps: "Sequence[Step]", targets: set[int]) -> list[Stretch | None]:
    """For every instruction the stretch that begins at it, if one does."""
    found: list[Stretch | None] = [None] * len(steps)
    start = 0
    for n in range(len(steps) + 1):
        inside = n < len(steps) and isinstance(steps[n].handler, Lanewise)
        if n in targets or not inside:
            if n - start > 1:
                found[start] = Stretch(steps[start:n])
            start = n if inside else n + 1
    return found


class _Text:
    """The Python text of a stretch. Names: r is a row, f a function, s and w read and write."""

    def __init__(self, steps: "Sequence[Step]"):
        self.steps = steps
        self.places: list[Place] = []
        self._names: dict[Any, str] = {}
        self._namespace: dict[str, Any] = {"copyto": np.copyto}
        # Names are given to rows and functions of both forms at once.
        self._lines = {masked: self._body(masked) for masked in (False, True)}

    def function(self, masked: bool) -> Callable[..., None]:
        """``masked``: of a warp, its rows and a mask; otherwise for all lanes."""
        rows = "".join(f"r{n}, " for n in range(len(self.places)))
        head = f"def run(warp, rows{', mask' if masked else ''}):\n {rows}= rows\n"
        namespace = dict(self._namespace)
        exec(head + "".join(f" {line}\n" for line in self._lines[masked]), namespace)
        return namespace["run"]

    def _body(self, masked: bool) -> list[str]:
        lines: list[str] = []
        for step in self.steps:
            assert isinstance(step.handler, Lanewise)
            mask = "mask" if masked else None
            if step.guard is not None:
                guard = ("~" if step.negated else "") + self._row(("pred", step.guard))
                mask = f"{guard} & mask" if masked else guard
            lines.append(self._line(step.handler, mask))
        return lines

    def _line(self, handler: Lanewise, mask: str | None) -> str:
        values = ", ".join(self._value(read) for read in handler.reads)
        if isinstance(handler, InPlace):
            where = "" if mask is None else f", where={mask}"
            out = self._row(handler.place)
            return f"{self._named('f', handler.function)}({values}, out={out}{where})"
        result = values
        if handler.function is not unchanged:
            result = f"{self._named('f', handler.function)}({values})"
        if not isinstance(handler.write, RowStore):
            return f"{self._named('w', handler.write)}(warp, {result}, {mask or True})"
        row = self._row(handler.write.place)
        if mask is None:
            return f"{row}[...] = {result}"
        return f"copyto({row}, {result}, where={mask})"

    def _value(self, read: Callable[["Warp"], Array]) -> str:
        return self._row(read.place) if isinstance(read, Row) else f"{self._named('s', read)}(warp)"

    def _row(self, place: Place) -> str:
        if place not in self._names:
            self._names[place] = f"r{len(self.places)}"
            self.places.append(place)
        return self._names[place]

    def _named(self, kind: str, value: Any) -> str:
        key = (kind, id(value))
        if key not in self._names:
            self._names[key] = f"{kind}{len(self._names)}"
            self._namespace[self._names[key]] = value
        return self._names[key]
