"""docs/blackwell.md says of every kernel what was done with it, and states no speed without a
record; nor does the README.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsv4.launch.signature import OPS
from dsv4.launch.target import ARCHITECTURES
from tests.test_records import missing, quoted

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "blackwell.md"
HOPPER = "sm_90a"
BLACKWELL = [target for target in ARCHITECTURES if target != HOPPER]
# A number with the unit of a rate or a duration, or that compares speeds.
SPEED = re.compile(
    r"\d[\d,.]*\s*(?:ns|µs|us|ms|s)\b"
    r"|\d[\d,.]*\s*(?:(?:[KMGT]B|tok|tokens?|TFLOPS?|TFLOP)\s*(?:/\s*s|per second|a second)|TFLOPS)"
    r"|\d[\d,.]*\s*(?:×|times|x)\s*(?:as fast|faster|slower|the speed)"
    r"|\d[\d,.]*\s*%\s*(?:faster|slower|more time|less time)"
)
# On the page of kernels that never ran, speeds are not even compared.
COMPARISON = re.compile(SPEED.pattern + r"|\b(?:faster|slower|speed-?ups?|quicker)\b")
LINK = re.compile(r"\]\(\.\./([\w/.]+)\)")


def rows(text: str) -> dict[str, list[str]]:
    """The cells behind the first one of the table of kernels, by the name in the first."""
    lines = [line for line in text.splitlines() if re.match(r"\| `[\w/]+` \|", line)]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    assert len({row[0] for row in cells}) == len(cells)
    return {row[0].strip("`"): row[1:] for row in cells}


def cuda_sources() -> list[str]:
    """Every source of CUDA C++ that is compiled, as ``Kernel.source`` names it."""
    return [path.relative_to(OPS).with_suffix("").as_posix() for path in OPS.glob("*/*.cu")]


def cutedsl_kernels() -> Iterator[str]:
    """Every class of the GEMM generators that has a kernel."""
    for path in (OPS / "linear" / "cutedsl").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                decorators = [ast.unparse(d) for method in methods for d in method.decorator_list]
                if "cute.kernel" in decorators:
                    yield node.name


def targets_of(kernel: str) -> Sequence[str]:
    """What a kernel is compiled for."""
    if kernel.endswith("_sm90") or kernel.startswith("Hopper"):
        return [HOPPER]
    return BLACKWELL if kernel.startswith(("Blackwell", "Scaled")) else ARCHITECTURES


def unfounded_speeds(text: str, speed: re.Pattern[str] = SPEED) -> list[str]:
    """Paragraphs that state a speed and quote no record; a table may quote it in the one before."""
    found = []
    before = ""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)):
        stated = speed.search(re.sub(r"\]\([^)]*\)", "]", paragraph))
        sources = paragraph + (before if paragraph.startswith("|") else "")
        names = quoted(sources)
        if stated and (not names or missing(names)):
            found.append(f"{stated[0]}: {' '.join(paragraph.split())[:80]}")
        before = paragraph
    return found


def test_every_kernel_has_a_row() -> None:
    found = rows(PAGE.read_text(encoding="utf-8"))
    assert set(found) == {*cuda_sources(), *cutedsl_kernels()}


def test_rows_say_what_was_done() -> None:
    for kernel, cells in rows(PAGE.read_text(encoding="utf-8")).items():
        compiled, simulated, executed, never = cells
        assert compiled == ", ".join(targets_of(kernel)), kernel
        for cell, needed in ((simulated, "tests.ptx"), (executed, "gpu")):
            tests = LINK.findall(cell)
            assert bool(tests) == (cell != "–"), (kernel, cell)
            for test in tests:
                text = (ROOT / test).read_text(encoding="utf-8")
                assert needed in text or "ops: Ops" in text, (kernel, test)
        ran = [] if executed == "–" else [HOPPER]
        expected = [target for target in targets_of(kernel) if target not in ran]
        assert never.split(", ") == (expected or ["–"]), kernel


def test_no_speed_is_stated_without_its_record() -> None:
    assert unfounded_speeds(PAGE.read_text(encoding="utf-8"), COMPARISON) == []
    assert unfounded_speeds((ROOT / "README.md").read_text(encoding="utf-8")) == []


def test_a_speed_without_a_record_is_noticed() -> None:
    for text in (
        "It takes 3.5 ms.",
        "1,200 TFLOP/s",
        "| a | 8 µs |",
        "3 times faster",
        "5 % slower",
    ):
        assert len(unfounded_speeds(f"Text.\n\n{text}\n\nText.")) == 1, text
    assert unfounded_speeds("W16 is faster.") == []
    assert len(unfounded_speeds("W16 is faster.", COMPARISON)) == 1
    record = "`ops_h200.json` has all.\n\n"
    assert unfounded_speeds(f"{record}| a | 8 µs |") == []
    assert len(unfounded_speeds(f"{record}It takes 8 µs.")) == 1
    assert len(unfounded_speeds("3 ms (`ops_b200.json`)")) == 1
    assert unfounded_speeds("128 tokens, sm_100a, 227 KiB, `setmaxnreg` 168, 3 × 128") == []
