"""The static scan of what runs per step: clean on this tree, and every waiting call is found."""

import textwrap

import pytest

from dsv4.validate.sync_scan import MEANT, PER_STEP, ROOT, WAITS, Finding, Place, scan, scan_tree

PATH = "dsv4/step/planted.py"


def planted(body: str) -> dict[str, str]:
    """A module with one method around ``body``."""
    return {PATH: f"class Step:\n    def run(self, x):\n{textwrap.indent(body, ' ' * 8)}\n"}


def test_the_steps_are_clean() -> None:
    assert [str(finding) for finding in scan_tree()] == []


@pytest.mark.parametrize("call", sorted(WAITS))
def test_a_planted_call_is_found(call: str) -> None:
    expected = [Finding(Place(PATH, "Step.run", call), 4)]
    for body in (f"x = 1\ny = x.sum().{call}()", f"x = 1\nf = lambda: {call} or x.{call}()"):
        assert scan(planted(body), {}) == expected
    assert str(expected[0]) == f"{PATH}:4: {call} in Step.run makes the host wait"


def test_a_copy_to_the_host_is_found() -> None:
    expected = [Finding(Place(PATH, "Step.run", "to"), 3)]
    assert scan(planted('x.to("cpu", copy=True)'), {}) == expected


def test_functions_inside_functions_have_qualified_names() -> None:
    body = "def queue():\n    torch.cuda.synchronize()\nreturn queue"
    assert [finding.place.function for finding in scan(planted(body), {})] == ["Step.run.queue"]


@pytest.mark.parametrize(
    "line", ["y = x.shape", "y = observer.item('moe')", "item(x)", "x.cpu", "x.to(y)"]
)
def test_other_calls_are_none(line: str) -> None:
    assert scan(planted(line), {}) == []


def test_what_is_meant_is_left_out_and_must_be_there() -> None:
    place = Place(PATH, "Step.run", "cpu")
    left = scan(planted("x.cpu()\nx.item()"), {place: "a reason"})
    assert [finding.place.call for finding in left] == ["item"]
    assert scan(planted("pass"), {place: "a reason"}) == [Finding(place, 0)]


def test_a_call_in_a_real_file_is_found_on_its_line() -> None:
    path = "dsv4/step/step.py"
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.startswith("    def run("))
    end = next(
        n for n, text in enumerate(lines[line:], line + 1) if text.startswith("        with")
    )
    lines.insert(end, "            torch.cuda.synchronize()")
    (finding,) = (at for at in scan({path: "\n".join(lines)}, {}) if at.place.call != "cpu")
    assert finding == Finding(Place(path, "Step.run", "synchronize"), end + 1)


def test_every_scanned_path_is_there_and_every_exception_has_a_reason() -> None:
    assert all((ROOT / path).exists() for path in PER_STEP)
    assert all(place.path.startswith(PER_STEP) and reason for place, reason in MEANT.items())
