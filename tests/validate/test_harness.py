"""``fire_b200_test``: the limit kills everything, exit codes pass through, the log tells, ssh gets
one command.
"""

import os
import signal
import stat
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest

from dsv4.validate import harness

GRACE_SECONDS = 0.2

# Ignores SIGTERM, has a grandchild that does too, and tells both pids once they do.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = os.fork()
if grandchild:
    print("started", flush=True)
    with open("pids.part", "w") as file:
        file.write(f"{os.getpid()} {grandchild}")
    os.rename("pids.part", "pids")
time.sleep(60)
"""

# Runs its last argument in a session of its own, as sshd does: what it runs ends only if it notices
# that ssh has.
SSH = """
import json, subprocess, sys
with open("ssh.json", "w") as file:
    json.dump(sys.argv[1:], file)
there = subprocess.Popen(["sh", "-c", sys.argv[-1]], stdin=subprocess.PIPE, start_new_session=True)
sys.exit(there.wait())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the modules that the tests run."""
    monkeypatch.chdir(tmp_path)
    for name in ("FIRE_B200_HOST", "FIRE_B200_DIR", "FIRE_B200_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    modules = {
        "stubborn": STUBBORN,
        "leaver": STUBBORN.replace("time.sleep(60)", "grandchild or time.sleep(60)"),
        "coded": "import sys\nprint('out')\nprint('err', file=sys.stderr)\n"
        "sys.exit(int(sys.argv[1]))",
        "killed": "import os\nos.kill(os.getpid(), 6)",
        "reader": "import sys\nprint(sys.stdin.read() or 'nothing')",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


@pytest.fixture
def ssh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake ssh on PATH; the file in which it records its arguments."""
    (folder / "bin").mkdir()
    fake = folder / "bin" / "ssh"
    fake.write_text(f"#!{sys.executable} -SE\n{SSH}")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FIRE_B200_HOST", "b200-node")
    monkeypatch.setenv("FIRE_B200_PYTHON", sys.executable)
    return folder / "ssh.json"


def fire(*arguments: str) -> int:
    return harness.main([*arguments], GRACE_SECONDS)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def eventually(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def stubborn_pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def assert_all_gone(folder: Path) -> None:
    pids = stubborn_pids(folder)
    assert len(pids) == 2
    assert eventually(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
def test_the_limit_kills_a_child_and_a_grandchild_that_ignore_sigterm(folder: Path, capsys) -> None:
    started = time.monotonic()
    assert fire("stubborn", "stuck", "run.log", "1") == 124
    assert time.monotonic() - started < 10
    assert_all_gone(folder)
    assert capsys.readouterr().out.startswith("stuck: timed out after 1.")
    assert "started" in Path("run.log").read_text()


@pytest.mark.slow
def test_the_limit_kills_on_the_other_node_too(folder: Path, ssh: Path, capsys) -> None:
    assert fire("stubborn", "stuck", "run.log", "1") == 124
    assert_all_gone(folder)
    assert "stuck: timed out" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("remote", [False, True])
def test_an_interrupt_kills_the_child(
    number: signal.Signals, remote: bool, folder: Path, request: pytest.FixtureRequest, capsys
) -> None:
    if remote:
        request.getfixturevalue("ssh")

    def interrupt() -> None:
        if eventually((folder / "pids").exists):
            os.kill(os.getpid(), number)

    # A test runner may have them ignored.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        assert fire("stubborn", "cut", "run.log", "30") == 130
    finally:
        sender.join()
        for changed, handler in before.items():
            signal.signal(changed, handler)
    assert_all_gone(folder)
    assert "cut: interrupted after" in capsys.readouterr().out
    assert "# exit code: 130\n" in Path("run.log").read_text()


@pytest.mark.parametrize("remote", [False, True])
def test_what_a_test_leaves_behind_is_killed(
    remote: bool, folder: Path, request: pytest.FixtureRequest
) -> None:
    if remote:
        request.getfixturevalue("ssh")
    assert fire("leaver", "left", "run.log") == 0
    assert_all_gone(folder)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(("test", "code"), [("coded 0", 0), ("coded 3", 3), ("killed", 134)])
def test_exit_codes_pass_through(
    test: str, code: int, remote: bool, request: pytest.FixtureRequest, capsys
) -> None:
    if remote:
        request.getfixturevalue("ssh")
    assert fire(test, "codes", "run.log") == code
    words = f"failed (exit code {code})" if code else "passed"
    assert capsys.readouterr().out.startswith(f"codes: {words} after ")


@pytest.mark.slow
def test_a_pytest_node_and_a_folder_run_under_pytest(folder: Path) -> None:
    (folder / "test_two.py").write_text("def test_good(): pass\ndef test_bad(): assert False")
    assert fire("test_two.py::test_good -q", "good", "run.log") == 0
    assert "1 passed" in Path("run.log").read_text()
    assert fire(".", "the folder", "run.log") == 1
    assert "1 failed, 1 passed" in Path("run.log").read_text()


def test_the_log_has_a_header_the_output_and_a_footer(capsys) -> None:
    assert fire("coded 3", "a label", "logs/new/run.log", "20") == 3
    lines = Path("logs/new/run.log").read_text().splitlines()
    assert lines[:3] == [
        "# name: a label",
        f"# command: {sys.executable} -m coded 3",
        f"# host: {os.uname().nodename}",
    ]
    assert lines[3].startswith("# started: 20")
    assert lines[3].endswith("Z")
    assert sorted(lines[4:-3]) == ["", "", "err", "out"]
    assert lines[-3].startswith("# failed (exit code 3) after 0.")
    assert lines[-2] == "# exit code: 3"
    assert lines[-1].startswith("# seconds: 0.")
    assert capsys.readouterr().out.rstrip().endswith("log in logs/new/run.log")


def test_a_test_has_no_standard_input() -> None:
    assert fire("reader", "reads", "run.log", "20") == 0
    assert "nothing" in Path("run.log").read_text()


def test_ssh_gets_the_host_and_one_command_in_the_checkout(
    folder: Path, ssh: Path, monkeypatch
) -> None:
    there = folder / "check out"
    there.mkdir()
    (there / "spelled.py").write_text("import sys\nprint(sys.argv[1:])")
    monkeypatch.setenv("FIRE_B200_DIR", str(there))
    # run.log is another file there.
    assert fire("spelled 'two words' $HOME run.log", "spelt", "run.log", "20") == 0
    text = Path("run.log").read_text()
    assert "['two words', '$HOME', 'run.log']" in text
    assert "# host: b200-node\n" in text
    recorded = ssh.read_text()
    for part in (
        '"b200-node"',
        '"BatchMode=yes"',
        "timeout --kill-after",
        f"cd '{there}' && exec sh -c",
        " 0.2 20 ",
    ):
        assert part in recorded


def test_a_test_may_have_bytes_that_are_no_utf_8() -> None:
    assert fire(os.fsdecode(b"coded 3 \xff"), "bytes", "run.log") == 3
    text = Path("run.log").read_text(encoding="utf-8")
    assert f"# command: {sys.executable} -m coded 3 '\\udcff'\n" in text
    assert "# exit code: 3\n" in text


def test_ssh_that_fails_says_so(folder: Path, ssh: Path, capsys) -> None:
    (folder / "bin" / "ssh").write_text("#!/bin/sh\necho no route to host >&2\nexit 255\n")
    assert fire("coded 0", "away", "run.log") == 255
    assert "ssh to b200-node failed" in capsys.readouterr().out
    assert "no route to host" in Path("run.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("test_none.py", "n", "run.log"), "TEST: test_none.py: no such file or folder"),
        (("test_none.py::test_x", "n", "run.log"), "TEST: test_none.py: no such file or folder"),
        (("", "n", "run.log"), "TEST: found '', expected"),
        (("'open", "n", "run.log"), 'TEST: found "\'open", expected'),
        (("-m", "n", "run.log"), "the following arguments are required"),
        (("coded", "n", "/dev/full"), "LOG: /dev/full: cannot be written (No space left on dev"),
        (("coded", "n", "x" * 300), f"LOG: {'x' * 300}: cannot be written (File name too long)"),
        (("a b;c", " ", "run.log"), "NAME: found ' ', expected"),
        (("coded", "two\nlines", "run.log"), "NAME: found 'two\\nlines', expected"),
        (("1 + 1", "n", "run.log"), "TEST: found '1', expected"),
        (("coded", "n", "run.log", "soon"), "TIMEOUT: found 'soon', expected"),
        (("coded", "n", "run.log", "0"), "TIMEOUT: found '0', expected"),
        (("coded", "n", "run.log", "nan"), "TIMEOUT: found 'nan', expected"),
        (("coded", "n", "run.log", "inf"), "TIMEOUT: found 'inf', expected"),
        (("coded", "n", "coded.py/run.log"), "LOG: coded.py/run.log: cannot be written"),
        (("coded", "n", "."), "LOG: .: cannot be written"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], message: str, capsys) -> None:
    assert fire(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("test", ["./coded.py::test_x -q", "coded 0 --json coded.py", "./ -q"])
def test_the_log_replaces_no_file_of_the_test(test: str, folder: Path, capsys) -> None:
    (folder / "linked").symlink_to("coded.py")
    before = Path("coded.py").read_text()
    assert fire(test, "n", "linked") == 2
    expected = "error: LOG: linked: found the file of TEST, expected another one\n"
    assert capsys.readouterr().err == expected
    assert Path("coded.py").read_text() == before


@pytest.mark.slow
def test_the_log_in_a_tested_folder_replaces_an_older_log() -> None:
    assert [fire("./ -q", "n", "run.log") for _ in range(2)] == [5, 5]


def test_wrong_settings_are_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FIRE_B200_HOST", "-oProxyCommand=x")
    assert fire("coded", "n", "run.log") == 2
    expected = "FIRE_B200_HOST: found '-oProxyCommand=x', expected a host name"
    assert expected in capsys.readouterr().err
    monkeypatch.delenv("FIRE_B200_HOST")
    monkeypatch.setenv("FIRE_B200_PYTHON", "/nowhere/python")
    assert fire("coded", "n", "run.log") == 2
    expected = "error: /nowhere/python: cannot be run (No such file or directory)\n"
    assert capsys.readouterr().err == expected


def test_the_console_script_is_declared() -> None:
    text = (Path(harness.__file__).parent.parent.parent / "pyproject.toml").read_text()
    scripts = tomllib.loads(text)["project"]["scripts"]
    assert scripts["fire_b200_test"] == "dsv4.validate.harness:program"
