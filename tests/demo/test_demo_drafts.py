"""The demo's own draft modules: small, found by their names, kept often, and of no effect on what
is said.
"""

import argparse
import json
import os
from pathlib import Path

import pytest

import single_shot_inference
from dsv4 import EngineConfig
from dsv4.cli.draft_flags import draft_folder
from dsv4.demo import CHECKPOINT, DRAFTS
from dsv4.demo.training import acceptance
from dsv4.errors import UserError

MAX_BYTES = 30 * 10**6
FIRST_DRAFTS_KEPT = 0.7
# Twelve prompts have about ninety first drafts: two standard deviations are a tenth.
OF_FEW_PROMPTS = 0.6
RECORDS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def test_all_together_they_are_small() -> None:
    files = [file for folder in DRAFTS.values() for file in folder.iterdir()]
    assert {file.name for file in files} == {"config.json", "model.safetensors"}
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES


@pytest.mark.parametrize("folder", [CHECKPOINT, DRAFTS["mtp"]], ids=["the demo", "the module"])
def test_what_is_measured_of_them_replaces_none(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^--json: .*config\.json: found the file of"):
        acceptance.parse(["mtp", "--json", str(folder / "config.json")])


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_driver_finds_them_and_says_the_same(
    draft: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = []
    for mode in ("off", draft):
        flags = ["--prompt", "Count from 17 to 25.", "--draft", mode, "--device", "cpu"]
        assert single_shot_inference.main([*flags, "--json", str(tmp_path / mode)]) == 0
        said.append(capfd.readouterr().out)
    assert said[0] == said[1] == "17, 18, 19, 20, 21, 22, 23, 24, 25\n"
    plain, drafted = (
        json.loads((tmp_path / mode).read_text(encoding="utf-8"))["timing"]["drafts"]
        for mode in ("off", draft)
    )
    assert plain is None
    assert drafted["tokens_per_step"] > 1


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_first_drafts_are_kept_on_held_out_prompts(draft: str) -> None:
    config = EngineConfig(device="cpu", ops="torch")
    report = acceptance.measure(draft, DRAFTS[draft], config, limit=1, seed=2)
    assert report["acceptance"][0] >= OF_FEW_PROMPTS
    assert all(task["equal_texts"] == 1 for task in report["tasks"].values())


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_record_meets_the_bar(draft: str) -> None:
    record = json.loads((RECORDS / f"demo_drafts_{draft}.json").read_text(encoding="utf-8"))
    assert record["acceptance"][0] >= FIRST_DRAFTS_KEPT
    tasks = record["tasks"].values()
    assert all(task["equal_texts"] == task["prompts"] for task in tasks)


def test_the_demo_by_any_path_has_them() -> None:
    relative = Path(os.path.relpath(CHECKPOINT))
    for model in (CHECKPOINT, relative, CHECKPOINT / ".." / "checkpoint"):
        asked = argparse.Namespace(model=model, draft="mtp", draft_weights=None)
        assert draft_folder(asked) == DRAFTS["mtp"]
