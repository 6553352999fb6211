"""Edits of PTX that plant one fault each; an edit that changes nothing is an error."""

import re
from collections.abc import Callable

Edit = Callable[[str], str]
WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64\s+P1,\s*\[([^\]]*)\],\s*([^,]*),[^;]*;"
"""A wait for an mbarrier inside its loop: the address is group 1, the parity group 2."""
NO_WAIT = "setp.eq.u32 P1, 0, 0;"
OTHER_PHASE = (
    r"{.reg .b32 other; xor.b32 other, \2, 1;"
    r" mbarrier.try_wait.parity.shared.b64 P1, [\1], other, 10000000;}"
)


def unchanged(ptx: str) -> str:
    """No fault."""
    return ptx


def replace(pattern: str, replacement: str, which: int | None = None) -> Edit:
    """Every match of a regular expression, or only that of a number."""

    def edit(ptx: str) -> str:
        matches = list(re.finditer(pattern, ptx))
        chosen = matches if which is None else [matches[which]]
        if not chosen:
            raise ValueError(f"nothing is {pattern}")
        for match in reversed(chosen):
            ptx = ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]
        return ptx

    return edit


def remove(pattern: str, which: int | None = None) -> Edit:
    """Every match of a regular expression, or only that of a number."""
    return replace(pattern, "", which)


def behind(marker: str, edit: Edit) -> Edit:
    """The edit of what follows the first match of a regular expression."""

    def edited(ptx: str) -> str:
        match = re.search(marker, ptx)
        if match is None:
            raise ValueError(f"nothing is {marker}")
        return ptx[: match.end()] + edit(ptx[match.end() :])

    return edited


def before(marker: str, edit: Edit) -> Edit:
    """The edit of what precedes the first match of a regular expression."""

    def edited(ptx: str) -> str:
        match = re.search(marker, ptx)
        if match is None:
            raise ValueError(f"nothing is {marker}")
        return edit(ptx[: match.start()]) + ptx[match.start() :]

    return edited


def more_bytes(count: int) -> Edit:
    """Barriers expect ``count`` more bytes than come."""
    return replace(
        r"(mbarrier\.arrive\.expect_tx\S*)\s+(\S+), (\[[^\]]*\]), ([^;]*);",
        rf"{{.reg .b32 bytes; add.s32 bytes, \4, {count}; \1 \2, \3, bytes;}}",
    )


def moved_box(number: int, coordinate: int, by: int) -> Edit:
    """A TMA load, the n-th of the text, starts ``by`` elements further along a coordinate."""

    def edit(ptx: str) -> str:
        load = list(re.finditer(r"cp\.async\.bulk\.tensor[^;]*::bytes[^;]*;", ptx))[number]
        return ptx[: load.start()] + moved(load[0], coordinate, by) + ptx[load.end() :]

    return edit


def next_rows_gathered(ptx: str) -> str:
    """Every gathering load takes the row behind the first of its four."""
    return re.sub(r"cp\.async[^;]*gather4[^;]*;", lambda match: moved(match[0], 1, 1), ptx)


def moved(load: str, coordinate: int, by: int) -> str:
    """A TMA load with another coordinate."""
    match = re.search(r"\{([^}]*)\}", load)
    assert match is not None
    names = [name.strip() for name in match[1].split(",")]
    changed = ", ".join([*names[:coordinate], "moved", *names[coordinate + 1 :]])
    planted = load.replace(match[1], changed)
    return f"{{.reg .b32 moved; add.s32 moved, {names[coordinate]}, {by}; {planted}}}"


def alloc_behind_cluster_barrier(ptx: str) -> str:
    """Tensor memory is allocated after the blocks of the cluster have met."""
    match = re.search(r"@(%p\d+) bra[^;]*;\s*mov\.b32[^;]*;\s*(tcgen05\.alloc[^;]*;)", ptx)
    assert match is not None
    late = f"barrier.cluster.wait; @!{match[1]} {match[2]}"
    return ptx.replace(match[2], "", 1).replace("barrier.cluster.wait;", late, 1)
