"""docs/model.md has every section that code, tests and documents refer to, and its tables are those
of the code; docs/architecture.md has every module, and imports go as it draws them. What texts name
as ``dsv4.module.name`` is there.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4.checkpoint import Geometry, geometry_config
from tests.source_rules import Source, imported_modules, read_sources
from tests.test_repo_rules import LEAVES

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "docs" / "model.md"
FOLDERS = ("dsv4", "encoding", "tests", "docs")
SUFFIXES = {".py", ".cu", ".cuh", ".md"}
# A numbered section is none of this repository's.
NUMBERED_SECTION = re.compile(r"\u00a7|\bspec(ification)? [0-9]", re.IGNORECASE)
REFERENCE = re.compile(r"\bmodel\.md(?:#([\w-]*))?")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUALIFIED_NAME = re.compile(r"`(dsv4(?:\.\w+)+)")
# In the text, or of what a reference names: where it leads, and to which heading.
LINK = re.compile(r"(?:\]\(|^\[[\w-]+\]: )(?!\w+:)([^\s#)]*)#?([\w-]*)", re.MULTILINE)


def texts() -> Iterator[tuple[str, str]]:
    """Path and text of every source file and document."""
    files = [
        file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES
    ]
    for file in sorted(files):
        yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


def headings(text: str) -> list[str]:
    """Anchors of the headings, as GitHub makes them."""
    outside_code = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", outside_code, flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def lines_with_numbered_sections(path: str, text: str) -> list[str]:
    return [
        f"{path}:{line}"
        for line, words in enumerate(text.splitlines(), 1)
        if NUMBERED_SECTION.search(words)
    ]


def broken_references(path: str, text: str, anchors: set[str]) -> list[str]:
    """References to a section that is not there; outside documents also those to no section."""
    found = []
    for line, words in enumerate(text.splitlines(), 1):
        for reference in REFERENCE.finditer(words):
            anchor = reference[1]
            page_as_a_whole = anchor is None and (path.endswith(".md") or "docs/model.md" in words)
            if anchor not in anchors and not page_as_a_whole:
                found.append(f"{path}:{line}: {reference[0]}")
    return found


@pytest.fixture(scope="module")
def model() -> str:
    return MODEL.read_text(encoding="utf-8")


def test_anchors_are_unique(model: str) -> None:
    assert [anchor for anchor, count in Counter(headings(model)).items() if count > 1] == []


def test_every_reference_has_its_section(model: str) -> None:
    anchors = set(headings(model))
    broken = [
        line
        for path, text in texts()
        if path != "tests/test_docs.py"
        for line in broken_references(path, text, anchors)
    ]
    assert broken == []


def test_no_section_numbers_of_another_document() -> None:
    assert [
        line for path, text in texts() for line in lines_with_numbered_sections(path, text)
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.finditer(page.read_text(encoding="utf-8"))
    assert [link[0] for link in links if not leads_somewhere(page, link[1], link[2])] == []


def leads_somewhere(page: Path, path: str, anchor: str) -> bool:
    """Whether a page's link has its file, and the heading in it."""
    target = page.parent / path if path else page
    if not target.exists():
        return False
    return not anchor or anchor in headings(target.read_text(encoding="utf-8"))


def test_links_are_found_and_those_that_lead_nowhere_noticed(model: str) -> None:
    assert LINK.findall(model)
    text = "[a](b.md#c) [d](#e)\n[f]: ../g.json\n[h](https://i.k)"
    assert LINK.findall(text) == [("b.md", "c"), ("", "e"), ("../g.json", "")]
    assert leads_somewhere(MODEL, "log.md", "streaming-decode")
    for path, anchor in (("no.md", ""), ("log.md", "no-heading"), ("", "no-heading")):
        assert not leads_somewhere(MODEL, path, anchor)


def test_a_missing_section_and_a_section_number_are_noticed() -> None:
    assert headings("# A b\n```\n# c\n```\n## D-e, f") == ["a-b", "d-e-f"]
    assert broken_references(
        "a.py", "see model.md#b, (model.md#c)\nmodel.md\ndocs/model.md", {"b"}
    ) == [
        "a.py:1: model.md#c",
        "a.py:2: model.md",
    ]
    assert lines_with_numbered_sections("a.py", "x\n(Spec \u00a73)\nspec 9.4\nspec11") == [
        "a.py:2",
        "a.py:3",
    ]


def top_level_names(file: Path) -> Iterator[str]:
    """What a module defines or imports, by the names that it has there."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        else:
            yield from (name.id for name in ast.walk(node) if isinstance(name, ast.Name))


def names_something(name: str) -> bool:
    """Whether ``dsv4.a.b`` is a package, a module, or a name of one; further parts are not asked
    for.
    """
    path = ROOT
    for part in name.split("."):
        path /= part
        if path.with_suffix(".py").is_file():
            rest = name.split(".")[len(path.relative_to(ROOT).parts) :]
            return not rest or rest[0] in top_level_names(path.with_suffix(".py"))
        if not path.is_dir():
            return part in top_level_names(path.parent / "__init__.py")
    return True


def test_names_with_their_module_are_there() -> None:
    found = [
        f"{path}: {name}"
        for path, text in texts()
        for name in QUALIFIED_NAME.findall(text)
        if path != "tests/test_docs.py" and not names_something(name)
    ]
    assert found == []


def test_a_name_that_its_module_lacks_is_noticed() -> None:
    for name in ("dsv4.step", "dsv4.step.step", "dsv4.step.step.Step.run", "dsv4.ops.TORCH"):
        assert names_something(name)
    for name in ("dsv4.nothing", "dsv4.step.Step", "dsv4.step.recorded.Along"):
        assert not names_something(name)


def section(text: str, title: str) -> str:
    """What stands between a heading of the third level and the next heading."""
    return re.split(
        r"^##+ ", text.partition(f"\n### {title}\n")[2], maxsplit=1, flags=re.MULTILINE
    )[0]


@pytest.mark.parametrize(("column", "name"), [(1, "v4-flash"), (2, "v4-pro")])
def test_tables_hold_the_published_values(model: str, column: int, name: Geometry) -> None:
    config = geometry_config(name)
    common = re.findall(r"`(\w+)` \| \w* ?\| ([\de-]+) \|", section(model, "Common values"))
    per_model = re.findall(
        r"^\| `(\w+)` \| \w* ?\| ([\d.]+) \| ([\d.]+) \|$", section(model, "Geometry"), re.MULTILINE
    )
    assert (len(common), len(per_model)) == (18, 9)
    shown = {row[0]: float(row[1]) for row in common} | {
        row[0]: float(row[column]) for row in per_model
    }
    assert shown == {key: config[key] for key in shown}


def unnamed_modules(tree: str, modules: list[str]) -> list[str]:
    """Modules that a tree does not name. Under a folder it names all modules, on indented lines or
    on lines of their own, or none.
    """
    named: dict[str, set[str]] = {}
    folder = ""
    for line in tree.splitlines():
        if line.startswith(" "):
            named[folder].update(re.findall(r"\w+\.py", line))
        else:
            folder = line.partition(" ")[0].rstrip("/")
            above, _, name = folder.rpartition("/")
            named.setdefault(above, set()).add(name)
            named.setdefault(folder, set())
    unnamed = []
    for module in modules:
        above, _, name = module.rpartition("/")
        lists_modules = any(other.endswith(".py") for other in named.get(above, ()))
        if above not in named or (lists_modules and name not in named[above]):
            unnamed.append(module)
    return unnamed


def test_the_tree_of_the_architecture_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = text.partition("## The tree\n\n```\n")[2].partition("```")[0]
    packages = [file.parent for file in (ROOT / "dsv4").glob("*/__init__.py")]
    files = [
        *(ROOT / "dsv4").glob("*.py"),
        *(file for package in packages for file in package.glob("*.py")),
    ]
    modules = {file.relative_to(ROOT).as_posix() for file in files if file.stem != "__init__"}
    assert len(modules) > 100
    assert unnamed_modules(tree, sorted(modules)) == []


def test_a_module_that_the_tree_lacks_is_noticed() -> None:
    tree = "a/b.py  x\na/c/  y:\n  d.py, e.py  z\na/f/  all of it\na/f/l/  m"
    modules = ["a/b.py", "a/g.py", "a/c/d.py", "a/c/e.py", "a/c/h.py", "a/f/i.py", "a/j/k.py"]
    assert unnamed_modules(tree, modules) == ["a/g.py", "a/c/h.py", "a/j/k.py"]


class Drawn:
    """The drawing of imports: the place of every entry, by row and column. ``ends``: the rows whose
    entries use each other.
    """

    def __init__(self, text: str) -> None:
        drawing = text.partition("\n## The direction of imports\n")[2].split("```\n")[1]
        rows = [re.findall(r"[\w/.]+", line) for line in drawing.splitlines()]
        self.ends = (0, len(rows) - 1)
        self.places = {
            f"dsv4.{entry.removesuffix('.py').replace('/', '.')}": (row, column)
            for row, entries in enumerate(rows)
            for column, entry in enumerate(entries)
        }

    def entry(self, module: str) -> str | None:
        """The entry that a module belongs to."""
        entries = [entry for entry in self.places if f"{module}.".startswith(f"{entry}.")]
        return max(entries, key=len, default=None)

    def against(self, source: Source) -> Iterator[str]:
        """Imports of what is neither to the right nor below."""
        here = self.entry(source.module)
        for line, module in imported_modules(source):
            there = self.entry(module)
            if here is None or there is None or here == there:
                continue
            row, column = self.places[there]
            own_row = row == self.places[here][0] and row in self.ends
            if (row, column) < self.places[here] and not own_row:
                yield f"{source.path}:{line}: {here} imports {there}"


def test_the_leaves_are_those_that_contributing_lists() -> None:
    text = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    row = text.partition("\n| the leaves ")[2].partition("|")[0]
    assert sorted(f"dsv4.{name}" for name in re.findall(r"`(\w+)`", row)) == sorted(LEAVES)


def test_imports_go_as_the_architecture_draws_them() -> None:
    drawn = Drawn((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    sources = [source for source in read_sources() if source.module.startswith("dsv4.")]
    assert len(sources) > 300
    undrawn = {source.module for source in sources if drawn.entry(source.module) is None}
    assert undrawn == {"dsv4.encoding"}
    assert [line for source in sources for line in drawn.against(source)] == []


def test_an_import_against_the_arrows_is_noticed() -> None:
    drawn = Drawn("\n## The direction of imports\n```\na, b\nc → d/e.py\nd    f\ng, h\n```\n")

    def found(path: str, module: str) -> bool:
        return any(drawn.against(Source.parse(path, f"import dsv4.{module}")))

    assert not any((found("dsv4/b.py", "a"), found("dsv4/c/x.py", "d.e"), found("dsv4/h.py", "g")))
    assert not any((found("dsv4/d/e.py", "d.x"), found("dsv4/b.py", "h"), found("dsv4/a.py", "b")))
    assert all((found("dsv4/d/x.py", "d.e"), found("dsv4/d/e.py", "c"), found("dsv4/f.py", "d.x")))
