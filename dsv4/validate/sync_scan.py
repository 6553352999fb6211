"""Finds calls that make the host wait for the device in the code that runs at every step: a commit
gate that needs no GPU.

Launchers are not scanned, because they only record. ``graph_readiness`` runs steps as well and has
torch raise where it waits; but torch does not see every wait (``Event.synchronize``), and a run
sees only the lines that it reaches.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PER_STEP = (
    "dsv4/step",
    "dsv4/decode",
    "dsv4/channels.py",
    "dsv4/turns.py",
    "dsv4/parallel/hand_off.py",
    "dsv4/launch/prepared.py",
    "dsv4/launch/program.py",
    "dsv4/launch/shapes.py",
    "dsv4/sampling.py",
    "dsv4/logprobs.py",
    "dsv4/caches/state.py",
)
WAITS = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero", "equal", "empty_cache"}


class Place(NamedTuple):
    """A call of that name in a function."""

    path: str
    function: str
    call: str


class Finding(NamedTuple):
    """A call that waits."""

    place: Place
    line: int

    def __str__(self) -> str:
        path, function, call = self.place
        return f"{path}:{self.line}: {call} in {function} makes the host wait"


# Where waiting is meant, and why.
MEANT = {
    Place("dsv4/step/direct.py", "DirectValues.value", "to"): "a trace is read on the host",
    Place(
        "dsv4/step/traced_values.py", "TracedValues.value.copy", "cpu"
    ): "a trace is read on the host",
    Place("dsv4/step/step.py", "Step.show", "cpu"): "a trace is read on the host",
    Place("dsv4/channels.py", "naming_lost_words", "tolist"): "behind a kernel that gave up",
    Place("dsv4/step/scored.py", "ScoredSteps.run", "cpu"): "what a prompt scores is read there",
    Place(
        "dsv4/step/chunks.py", "run_chunks", "synchronize"
    ): "a chunk is queued when only a given number before it are unfinished",
    Place(
        "dsv4/step/token_feed.py", "TokenFeed.put", "synchronize"
    ): "pinned memory is written again only when its copy of four steps ago has been read",
    Place(
        "dsv4/step/token_ring.py", "TokenRing.read", "synchronize"
    ): "the caller asks for a token; later steps are queued",
    Place(
        "dsv4/logprobs.py", "TokenLogprobs.of", "tolist"
    ): "asked for by the caller; in the token loop the copies to the host are done",
    Place(
        "dsv4/sampling.py", "SamplerState.load", "synchronize"
    ): "once per sequence, for the copy of four loads ago",
    Place(
        "dsv4/caches/state.py", "DecodeState.wait", "synchronize"
    ): "once per sequence, for steps that a stop has left queued",
    Place(
        "dsv4/decode/cuda_graph_decoder.py", "CUDAGraphDecoder._capturing", "synchronize"
    ): "before a capture, at load",
    Place(
        "dsv4/decode/cuda_graph_decoder.py", "CUDAGraphDecoder._captured_step", "synchronize"
    ): "before a capture, at load",
    Place("dsv4/decode/choose.py", "_check", "equal"): "compares steps, once, at load",
    Place("dsv4/decode/choose.py", "_check", "cpu"): "ends a timing, once, at load",
}


def scan_tree() -> list[Finding]:
    """``scan`` of what runs per step in this checkout or installation."""
    paths = [ROOT / path for path in PER_STEP]
    files = [file for path in paths for file in (sorted(path.glob("*.py")) or [path])]
    return scan({file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in files})


def scan(sources: Mapping[str, str], meant: Mapping[Place, str] = MEANT) -> list[Finding]:
    """Waits in the sources (texts by path) that are not meant; and, at line 0, meant ones that are
    gone.
    """
    found = [
        finding for path, text in sources.items() for finding in _waits(ast.parse(text), path, ())
    ]
    places = {finding.place for finding in found}
    unmeant = [finding for finding in found if finding.place not in meant]
    return unmeant + [Finding(place, 0) for place in meant if place not in places]


def _is_cpu(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == "cpu"


def _waits(node: ast.AST, path: str, scope: tuple[str, ...]) -> Iterator[Finding]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        scope = (*scope, node.name)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        # A tensor's item takes no argument here.
        is_wait = name in WAITS and not (name == "item" and node.args)
        if is_wait or (name == "to" and node.args and _is_cpu(node.args[0])):
            yield Finding(Place(path, ".".join(scope), name), node.lineno)
    for child in ast.iter_child_nodes(node):
        yield from _waits(child, path, scope)
