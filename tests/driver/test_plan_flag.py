"""``--plan``: the memory plan in place of an answer."""

import json
from pathlib import Path

from tests.driver.conftest import read_json
from tests.driver.drive import Drive


def test_plan_prints_the_table_and_reads_no_weight(drive: Drive, broken_copy: Path) -> None:
    result = drive("--plan", "--max-context", 1000, "--device", "cpu")
    assert result.code == 0
    assert "1,000 tokens" in result.out
    assert "weights" in result.out
    assert result.err == ""


def test_plan_goes_to_the_json_file_as_well(drive: Drive, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert drive("--plan", "--max-context", 1000, "--device", "cpu", "--json", path).code == 0
    record = read_json(path)
    plan = record["plan"]
    (device,) = plan["devices"]
    assert (plan["max_context"], plan["fits"]) == (1000, True)
    assert (device["device"], device["layers"], device["fits"]) == ("cpu", 4, True)
    assert device["weight_bytes"] > 0
    assert record["config"]["engine"]["max_context"] == 1000
    assert record["provenance"]["command"]


def test_plan_of_gpus_that_are_not_there_takes_gigabytes(drive: Drive) -> None:
    result = drive("--plan", "--gpus", 2, "--gpu-memory", 0.75, "--json", "-")
    *rows, staging, record = result.out.splitlines()[2:]
    pinned = json.loads(record)["plan"]["pinned_host_bytes"] / (1 << 30)
    assert staging == f"loading takes {pinned:.3f} GiB of pinned memory on the host"
    assert [row.split()[0] for row in rows] == ["cuda:0", "cuda:1"]
    assert [row.split()[8:10] for row in rows] == [[row.split()[8], "0.750"] for row in rows]
    drive("--gpu-memory", 192).assert_user_error("--gpu-memory", "--plan")
    for less in (0, "1e-10"):
        drive("--plan", "--gpu-memory", less).assert_user_error("--gpu-memory: found", "from 1e-09")
