"""Speculative modules in checkpoints: kind and stages from the names, formats, nothing unfilled."""

from pathlib import Path

import pytest

from dsv4.checkpoint import Layout, mtp_kind, open_checkpoint, tiny_config, write_synthetic
from dsv4.checkpoint.drafts import mtp_stages
from dsv4.checkpoint.load import load_found
from dsv4.checkpoint.stored_parameters import find_draft
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.weights.parameters import MtpKind, parameters
from dsv4.weights.quant import QuantFormat
from tests.checkpoint.folders import CPU, Tensors, changed_copy, config_of, load, matrix

DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 200,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 32,
}
KINDS: tuple[MtpKind, ...] = ("classic", "dspark")


def written(folder: Path, mtp: MtpKind | None, layout: Layout = "bf16", **keys: object) -> Path:
    raw = tiny_config(**(DSPARK if mtp == "dspark" else {}), **keys)
    write_synthetic(folder, raw, layout, 1, mtp=mtp)
    return folder


@pytest.mark.parametrize("said", [0, 1, 2])
@pytest.mark.parametrize(("kind", "stages"), [("classic", 1), ("dspark", 3)])
def test_kind_and_stages_are_those_of_the_names_whatever_the_config_says(
    kind: MtpKind, stages: int, said: int, tmp_path: Path
) -> None:
    folder = written(tmp_path / "x", kind, num_nextn_predict_layers=said)
    checkpoint = open_checkpoint(folder)
    assert mtp_kind(checkpoint) == kind
    assert mtp_stages(checkpoint) == stages
    found = {
        stored.parameter.name for stored in find_draft(checkpoint, config_of(checkpoint), kind)
    }
    assert found == {
        name for name in parameters(config_of(checkpoint), kind) if name.startswith("mtp.")
    }


def test_two_blocks_of_classic_mtp_are_refused(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["mtp.1.enorm.weight"] = tensors["mtp.0.enorm.weight"].clone()

    folder = changed_copy(written(tmp_path / "x", "classic"), tmp_path / "y", edit)
    with pytest.raises(UserError, match=r"found 2 blocks of classic MTP, expected mtp\.0 alone"):
        load(folder, mtp="classic")


@pytest.mark.parametrize("kind", KINDS)
def test_spec11_j80_a_folder_of_a_module_alone_is_complete_or_refused(
    kind: MtpKind, tmp_path: Path
) -> None:
    def alone(tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}

    whole = written(tmp_path / "x", kind, "nvfp4-experts")
    checkpoint = open_checkpoint(changed_copy(whole, tmp_path / "alone", alone))
    config = config_of(checkpoint)
    found = find_draft(checkpoint, config, kind)
    weights = load_found(checkpoint, config, found, lambda _: CPU)
    last = max(weights)[: len("mtp.0")]
    assert matrix(weights, f"{last}.ffn.experts.w1.weight").format is QuantFormat.MXFP4
    for missing in (f"{last}.norm.weight", f"{last}.ffn.experts.7.w2.scale"):

        def without(tensors: Tensors, missing: str = missing) -> Tensors:
            del tensors[missing]
            return alone(tensors)

        folder = changed_copy(whole, tmp_path / missing, without)
        with pytest.raises(UserError, match=f"1 missing: {missing}"):
            find_draft(open_checkpoint(folder), config, kind)


def test_a_tensor_of_a_module_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["mtp.0.attn.wq_c.weight"] = tensors["mtp.0.enorm.weight"].clone()
        tensors["layers.9.attn.wq_c.weight"] = tensors["mtp.0.enorm.weight"].clone()

    folder = changed_copy(written(tmp_path / "x", "classic"), tmp_path / "y", edit)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UserError, match=r"1 unexpected: mtp\.0\.attn\.wq_c\.weight$"):
        find_draft(checkpoint, config_of(checkpoint), "classic")


@pytest.mark.parametrize("targets", [[2, 1, 3], [1, 1, 2]])
def test_taps_out_of_order_are_refused(targets: list[int]) -> None:
    raw = tiny_config(**{**DSPARK, "dspark_target_layer_ids": targets})
    with pytest.raises(UserError, match="dspark_target_layer_ids: found .*ascending order"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("targets", [[True, 2, 3], [False, 1], [1.0, 2], ["1"], [], [4], 1])
def test_taps_that_are_no_layers_are_refused(targets: object) -> None:
    raw = tiny_config(**{**DSPARK, "dspark_target_layer_ids": targets})
    with pytest.raises(UserError, match="dspark_target_layer_ids: found .*list of layer ids below"):
        ModelConfig.from_dict(raw)
