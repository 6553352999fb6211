"""Flags of the validation layer by layer that are refused."""

from pathlib import Path
from typing import Any

import pytest

from dsv4.checkpoint import tiny_config, write_synthetic
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.validate.layer_flags import check_room, described, engine_configs, parse
from dsv4.validate.layers import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flags") / "tiny"
    write_synthetic(folder, tiny_config(n_routed_experts=16), "nvfp4-experts", 0)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "2:2"], "--layers: found '2:2', expected A:B with 0 ≤ A < B ≤ 4, or A"),
        (["--layers", "0:5"], "--layers: found '0:5'"),
        (["--layers", "4"], "--layers: found '4'"),
        (["--layers", "a"], "--layers: found 'a'"),
        (["--layers", "-1:2"], "--layers: found '-1:2'"),
        (["--layers", ""], "--layers: found ''"),
        (["--tokens", "0"], "--tokens: found '0', expected an integer from 1 to 65536"),
        (["--chunk", "0"], "--chunk: found '0'"),
        (["--context", "-1"], "--context: found '-1'"),
        (["--context", str(2**20)], "--context: found 1048576 and --tokens 24, expected at most"),
        (["--layout", "native"], "--layout: found without --geometry, expected no"),
        (["--geometry", "v4-pro", "--layout", "int4"], "--layout: invalid choice: 'int4'"),
        (["--gpus", "2"], "--gpus: found 2, expected 1 when running on the CPU"),
        (["--input", "nowhere"], "nowhere: no such file"),
        (["--input", "torch"], "torch: no such file"),
        (["--input", "transformers"], "transformers: no such file"),
        (["--reference", "own"], "own: no such file"),
        (["--reference", "reference"], "reference: no such file"),
        (["--seed", str(2**63)], "--seed: found '9223372036854775808', expected an integer from 0"),
        (["--json", "out", "--svg", "./out"], "--svg: out: found the file of --json"),
        (["--swap", "moe"], "--swap: found 'moe'"),
        (["--reference", "transformers", "--context", "8"], "--context: found with --reference"),
        (["--tokens", "5", "--input", "none"], "--tokens: found with a trace, which says it,"),
        (["--context", "5", "--input", "none"], "--context: found with a trace, which says it,"),
        (["--geometry", "v4-pro", "--model", "."], "--model: found with --geometry, expected no"),
    ],
)
def test_wrong_flags_are_one_line(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    place = [] if "--geometry" in arguments else ["--model", str(model)]
    joined = [f"{arguments[0]}={arguments[1]}", *arguments[2:]]
    assert main(["--device", "cpu", *place, *joined]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_both_sides_compute_as_their_flags_say() -> None:
    ours = ["--device", "cuda", "--gpus", "2", "--ops", "torch", "--compute-dtype", "float32"]
    shared = ["--kv-dtype", "bf16", "--prefill-activations", "fp8"]
    of_both: dict[str, Any] = {"ops": "torch", "kv_dtype": "bf16", "prefill_activations": "fp8"}
    given: list[tuple[list[str], Any]] = [
        ([], "float32"),
        (["--reference-compute-dtype", "bfloat16"], "bfloat16"),
    ]
    for theirs, dtype in given:
        options = parse([*ours, *shared, *theirs], None)
        assert engine_configs(options) == (
            EngineConfig(device="cuda", gpus=2, compute_dtype="float32", **of_both),
            EngineConfig(device="cpu", gpus=1, compute_dtype=dtype, **of_both),
        )


def test_random_weights_are_named_by_their_geometry_and_layout() -> None:
    found = described(parse(["--geometry", "v4-pro", "--layout", "native"], None))
    assert (found["model"], found["layout"]) == ("v4-pro", "native")


def test_tokens_reach_the_last_position_of_the_model() -> None:
    config = ModelConfig.from_dict(tiny_config(max_position_embeddings=100))
    check_room(parse(["--context", "90", "--tokens", "10"], None), config)
    with pytest.raises(
        UserError, match="--context: found 90 and --tokens 11, expected at most 100"
    ):
        check_room(parse(["--context", "90", "--tokens", "11"], None), config)
