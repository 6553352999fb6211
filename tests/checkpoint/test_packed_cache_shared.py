"""Packed weights on disk that several processes use, or that one of them leaves behind."""

import signal
import subprocess
import sys

import pytest

from dsv4.checkpoint import packed_cache as module
from dsv4.checkpoint.identity import checkpoint_identity
from dsv4.checkpoint.index import open_checkpoint
from dsv4.checkpoint.packed_cache import MANIFEST, PackedCache
from tests.checkpoint.packed_starts import Starts
from tests.source_rules import ROOT

pytestmark = pytest.mark.slow

START = """
import sys
from dsv4 import Engine, EngineConfig
{before}
config = EngineConfig(device="cpu", ops="torch", max_context=32, packed_cache=sys.argv[2])
print(Engine.load(sys.argv[1], config).prefill([3, 1, 4, 1, 5]).tolist())
"""
KILLED = """
import os, signal
from pathlib import Path
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def process(starts: Starts, before: str = "") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", START.format(before=before), starts.folder, starts.cache]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_what_a_killed_process_leaves_is_no_entry_and_goes(starts: Starts) -> None:
    starts.cache.mkdir()
    foreign = starts.cache / ".foreign.abcdefgh"
    foreign.mkdir()
    killed = process(starts, KILLED)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    left = [path for path in starts.entries if path != foreign]
    assert [path.name[0] for path in left] == ["."]
    assert (left[0] / MANIFEST).exists()
    unfinished = starts.cache / f".{'0' * 32}.abcdefgh"
    unfinished.mkdir()
    with module._locked(starts.cache, "0" * 32, module.fcntl.LOCK_EX):
        assert starts()[0] > 0
    assert not left[0].exists()
    assert foreign.exists()
    assert unfinished.exists(), "another process is writing it"
    assert starts()[0] == 0


def test_a_start_reads_while_another_one_reads(starts: Starts) -> None:
    assert starts()[0] > 0
    (entry,) = starts.entries
    with module._locked(starts.cache, entry.name, module.fcntl.LOCK_SH):
        assert starts()[0] == 0


def test_processes_at_once_all_answer_and_leave_one_entry(starts: Starts) -> None:
    running = [process(starts) for _ in range(2)]
    answers = [one.communicate()[0] for one in running]
    assert [one.returncode for one in running] == [0, 0]
    assert answers[0] == answers[1]
    assert len(starts.entries) == 1
    assert starts()[0] == 0


def test_an_entry_in_use_is_left_alone(starts: Starts) -> None:
    """A reader holds it while another process would write, and the other way round."""
    count, _ = starts()
    (entry,) = starts.entries
    with module._locked(starts.cache, entry.name, module.fcntl.LOCK_EX):
        assert starts()[0] == count
    cache = open_checkpoint(starts.folder)
    other = PackedCache(starts.cache, cache, "other", "torch bf16", 1)
    assert other.entry == entry
    before = (entry / MANIFEST).read_bytes()
    with module._locked(starts.cache, entry.name, module.fcntl.LOCK_SH):
        other.write([{}])
    assert (entry / MANIFEST).read_bytes() == before
    other.write([{}])
    assert (entry / MANIFEST).read_bytes() != before


def test_who_was_slower_leaves_the_entry_of_the_faster_one(starts: Starts) -> None:
    assert starts()[0] > 0
    (entry,) = starts.entries
    checkpoint = open_checkpoint(starts.folder)
    identity = checkpoint_identity(checkpoint)
    slower = PackedCache(starts.cache, checkpoint, identity, "torch bf16", 1)
    assert slower.entry == entry
    slower.write([{}])
    assert starts()[0] == 0
