"""Where things lie: names at the top, tests beside ops, lengths of lines and pages, what the wheel
holds.
"""

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.source_rules import DRIVER, ROOT

MAX_DRIVER_LINES = 200
MAX_README_LINES = 150
MAX_TEST_FILE_LINES = 300
MAX_KERNEL_FILE_LINES = 500
MAX_KERNEL_COLUMNS = 100
MAX_DOCUMENT_COLUMNS = 120

TOP_LEVEL_NAMES = {
    *(".ci", ".gitattributes", ".gitignore", ".pre-commit-config.yaml", "LICENSE", "Makefile"),
    *("README.md", "docs", "dsv4", "encoding", "pyproject.toml", DRIVER, "tests"),
}
# Rooms whose kernels are compiled by tests/ops/test_compile_small.py, which reads no SASS.
COMPILED_TOGETHER = (
    *(
        "channel",
        "draft_rows",
        "kv_write",
        "markov",
        "norm",
        "opening",
        "quantize_activations",
        "rope",
    ),
    *("router", "scatter", "stream_means", "token_ring"),
)
# Rooms whose tests on a GPU stand with the others, and why.
NO_GPU_FILE = {
    "token_ring": "one launch of one thread: test_token_ring.py runs it on a GPU by the ops fixture"
}


def kernel_files() -> list[Path]:
    return sorted(path for path in (ROOT / "dsv4/ops").rglob("*") if path.suffix in (".cu", ".cuh"))


def rooms_with_kernels() -> list[str]:
    rooms = {path.parent for path in kernel_files() if path.suffix == ".cu"}
    assert all(room.parent == ROOT / "dsv4/ops" for room in rooms)
    return sorted(room.name for room in rooms)


def missing_tests(room: str, files: set[str]) -> list[str]:
    """Test files that a room with kernels lacks: what is recorded, that it compiles, a GPU's."""
    wanted = [f"test_{room}_launches.py"]
    if room not in COMPILED_TOGETHER:
        wanted.append("test_compile_*.py")
    if room not in NO_GPU_FILE:
        wanted.append(f"test_{room}_cuda.py")
    return [name for name in wanted if not any(fnmatch(file, name) for file in files)]


def test_every_op_has_a_test_file() -> None:
    rooms = [path.parent.name for path in (ROOT / "dsv4/ops").glob("*/__init__.py")]
    assert rooms
    assert [op for op in rooms if not (ROOT / f"tests/ops/{op}/test_{op}.py").is_file()] == []


@pytest.mark.parametrize("room", rooms_with_kernels())
def test_every_room_with_kernels_has_its_tests(room: str) -> None:
    files = {path.name for path in (ROOT / "tests/ops" / room).glob("test_*.py")}
    assert missing_tests(room, files) == []


def test_exceptions_of_rooms_are_still_true() -> None:
    together = (ROOT / "tests/ops/test_compile_small.py").read_text(encoding="utf-8")
    assert [room for room in COMPILED_TOGETHER if f'"{room}/' not in together] == []
    for room in NO_GPU_FILE:
        path = ROOT / f"tests/ops/{room}/test_{room}.py"
        assert "ops: Ops" in path.read_text(encoding="utf-8")
    assert {*COMPILED_TOGETHER, *NO_GPU_FILE} <= set(rooms_with_kernels())


def test_a_room_without_tests_is_noticed() -> None:
    assert missing_tests("a", set()) == [
        "test_a_launches.py",
        "test_compile_*.py",
        "test_a_cuda.py",
    ]
    assert missing_tests("a", {"test_a_launches.py", "test_compile_a.py", "test_a_cuda.py"}) == []


def test_top_level_names_are_the_known_ones() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(
        [git, "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\n")
    assert {path.partition("/")[0] for path in tracked if path} - TOP_LEVEL_NAMES == set()


@pytest.mark.parametrize(
    ("name", "limit"), [("README.md", MAX_README_LINES), (DRIVER, MAX_DRIVER_LINES)]
)
def test_front_page_and_driver_stay_short(name: str, limit: int) -> None:
    path = ROOT / name
    assert not path.is_file() or len(path.read_text(encoding="utf-8").splitlines()) <= limit


def test_test_files_are_small() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in files
    }
    assert {path: lines for path, lines in lengths.items() if lines > MAX_TEST_FILE_LINES} == {}


def wide_lines(text: str, columns: int) -> list[int]:
    return [line for line, words in enumerate(text.splitlines(), 1) if len(words) > columns]


def prose(text: str) -> str:
    """A document's lines with tables, code blocks and the targets of links blanked."""
    return "\n".join(_prose_lines(text))


def _prose_lines(text: str) -> Iterator[str]:
    fence = None
    indented = False
    before = ""
    for line in text.splitlines():
        marker = re.match(r" *(```+|~~~+)", line)
        if marker is not None and fence in (None, marker[1]):
            fence = marker[1] if fence is None else None
            words = ""
        else:
            # An indented block after an empty line; a list inside a list is prose.
            item = re.match(r" *([-*+]|\d+\.) ", line)
            deep = line.startswith("    ") and item is None
            indented = deep and (indented or not before)
            table = line.lstrip().startswith("|")
            words = "" if fence is not None or indented or table else line
        before = line.strip()
        yield re.sub(r"<?\bhttps?://[^\s)>]+>?", "", re.sub(r"\]\([^)]*\)", "]", words))


@pytest.mark.parametrize("path", kernel_files(), ids=lambda path: path.name)
def test_kernels_are_short_enough_and_their_lines_fit(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_KERNEL_FILE_LINES
    assert wide_lines(text, MAX_KERNEL_COLUMNS) == []


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
    ],
)
def test_lines_of_documents_fit(name: str) -> None:
    path = ROOT / name
    if path.is_file():
        assert wide_lines(prose(path.read_text(encoding="utf-8")), MAX_DOCUMENT_COLUMNS) == []


def test_wide_lines_are_noticed_outside_tables_code_and_links() -> None:
    wide = "x" * 121
    allowed = [
        *(f"| {wide} |", "```", wide, "```", "", f"    {wide}"),
        *("", f"[a](https://b/{wide})", f"<https://b/{wide}>"),
    ]
    text = "\n".join([*allowed, wide, f"  - {wide}", f"    - {wide}"])
    first = len(allowed) + 1
    assert wide_lines(prose(text), MAX_DOCUMENT_COLUMNS) == [first, first + 1, first + 2]
    assert wide_lines("x" * 100 + "\n" + "x" * 101, MAX_KERNEL_COLUMNS) == [2]


def test_wheel_has_the_demo_and_the_kernels_but_not_the_training() -> None:
    setuptools = pytest.importorskip("setuptools")
    with (ROOT / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)["tool"]["setuptools"]
    assert settings["py-modules"] == [DRIVER.removesuffix(".py")]
    find = settings["packages"]["find"]
    assert find["namespaces"] is False
    packages = set(
        setuptools.find_packages(str(ROOT), include=find["include"], exclude=find["exclude"])
    )
    training = {name for name in packages if name.startswith("dsv4.demo.training")}
    assert training == set()
    assert {name.partition(".")[0] for name in packages} == {"dsv4", "encoding"}
    folders = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for name in ("dsv4", "encoding")
        for path in (ROOT / name).rglob("*.py")
    }
    assert folders - packages == {"dsv4.demo.training"}

    data = settings["package-data"]
    assert {"dsv4.demo", "dsv4.ops"} <= data.keys() & packages
    held = {
        path
        for package, patterns in data.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    checkpoint = set((ROOT / "dsv4/demo/checkpoint").iterdir())
    assert {path.name for path in checkpoint} >= {"config.json", "tokenizer.json"}
    assert {*kernel_files(), *checkpoint} - held == set()
