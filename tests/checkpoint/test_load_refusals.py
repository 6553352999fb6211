"""Checkpoints that cannot be loaded: one line with everything that is wrong."""

from pathlib import Path

import pytest
import torch

from dsv4.checkpoint import (
    describe,
    load_weights,
    open_checkpoint,
    tiny_config,
    write_synthetic,
)
from dsv4.errors import UserError
from tests.checkpoint.folders import (
    CPU,
    Tensors,
    changed_copy,
    config_of,
    load,
)


def test_all_problems_are_in_one_line(native: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["layers.1.attn.wq_a.scale"]
        tensors["layers.1.attn.surprise.weight"] = torch.zeros(1)
        tensors["rotary.inv_freq"] = torch.zeros(1)
        tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()
        tensors["head.weight"] = tensors["head.weight"].half()

    with pytest.raises(UserError) as caught:
        load(changed_copy(native, tmp_path / "x", edit))
    message = str(caught.value)
    assert "1 missing: layers.1.attn.wq_a.scale" in message
    assert "2 unexpected: rotary.inv_freq, layers.1.attn.surprise.weight" in message
    assert "1 of wrong shape: norm.weight (found [127], expected [128])" in message
    assert "1 of wrong dtype: head.weight (found F16, expected BF16)" in message
    assert "\n" not in message


def test_long_lists_are_capped_with_a_count(native: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> Tensors:
        return {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith("layers.3.ffn.experts.")
        }

    with pytest.raises(UserError, match=r"48 missing: .*\(and 40 more\)$") as caught:
        load(changed_copy(native, tmp_path / "x", edit))
    assert len(str(caught.value)) < 1000


def test_a_wrong_tensor_among_many_experts_is_found(native: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["layers.2.ffn.experts.5.w2.weight"] = tensors["layers.2.ffn.experts.5.w2.weight"][
            :, :-1
        ].clone()

    with pytest.raises(
        UserError,
        match=r"layers.2.ffn.experts.5.w2.weight \(found \[128, 31\], expected \[128, 32\]\)",
    ):
        load(changed_copy(native, tmp_path / "x", edit))


def test_hostile_names_are_escaped(native: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["evil\nname\x1b[31m"] = torch.zeros(1)

    with pytest.raises(UserError, match="unexpected") as caught:
        load(changed_copy(native, tmp_path / "x", edit))
    assert str(caught.value).isprintable()


def test_one_element_is_no_vector_and_input_scales_go_with_nvfp4_alone(
    native: Path, tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["norm.weight"] = tensors["norm.weight"][:1].clone()
        tensors["layers.1.attn.wq_a.input_scale"] = torch.ones(())

    shape = r"1 of wrong shape: norm\.weight \(found \[1\], expected \[128\]\)"
    name = r"1 unexpected: layers\.1\.attn\.wq_a\.input_scale"
    with pytest.raises(UserError, match=f": {shape}; {name}$"):
        load(changed_copy(native, tmp_path / "x", edit))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("norm.weight", float("nan"), "1 not finite: norm.weight"),
        ("layers.0.attn.attn_sink", float("inf"), "1 not finite: layers.0.attn.attn_sink"),
        ("layers.0.ffn.gate.tid2eid", 8, r"tid2eid \(found expert ids 0 to 8, expected 0 to 7\)"),
        ("layers.0.ffn.gate.tid2eid", -1, r"tid2eid \(found expert ids -1 to 7, expected 0 to 7\)"),
        (
            "layers.2.ffn.experts.3.w1.weight_scale_2",
            0.0,
            r"experts.3.w1.weight_scale_2: found 0.0",
        ),
        (
            "layers.2.ffn.experts.3.w1.weight_scale_2",
            float("nan"),
            r"experts.3.w1.weight_scale_2: found nan",
        ),
        (
            "layers.2.ffn.experts.3.w1.weight_scale_2",
            float("inf"),
            r"experts.3.w1.weight_scale_2: found inf, expected a finite number above 0$",
        ),
        (
            "layers.2.ffn.experts.3.w1.input_scale",
            float("nan"),
            r"experts.3.w1.input_scale: found nan, expected a finite number from 0$",
        ),
        (
            "layers.2.ffn.experts.3.w1.input_scale",
            float("inf"),
            r"experts.3.w1.input_scale: found inf, expected a finite number from 0$",
        ),
        (
            "layers.2.ffn.experts.3.w1.input_scale",
            -1.0,
            r"experts.3.w1.input_scale: found -1.0, expected a finite number from 0$",
        ),
    ],
)
def test_impossible_values_are_refused(
    nvfp4_experts: Path, tmp_path: Path, name: str, value: float, message: str
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[name].view(-1)[0] = value

    with pytest.raises(UserError, match=message):
        load(changed_copy(nvfp4_experts, tmp_path / "x", edit))


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 2), (1, 2)])
def test_a_token_routed_to_one_expert_twice_is_refused(
    tmp_path: Path, first: int, second: int
) -> None:
    write_synthetic(tmp_path / "x", tiny_config(num_experts_per_tok=3), "native", 1)

    def edit(tensors: Tensors) -> None:
        ids_VK = tensors["layers.0.ffn.gate.tid2eid"]
        ids_VK[5] = 3
        ids_VK[5, [first, second]] = 7

    with pytest.raises(UserError, match=r"tid2eid \(found an expert twice for token 5, expected"):
        load(changed_copy(tmp_path / "x", tmp_path / "y", edit))


def test_ids_that_are_equal_in_their_low_32_bits_are_out_of_range_and_not_the_same(
    native: Path, tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["layers.0.ffn.gate.tid2eid"][5] = torch.tensor([3, 2**32 + 3])

    message = r": 1 out of range: \S+tid2eid \(found expert ids 0 to 4294967299, expected 0 to 7\)$"
    with pytest.raises(UserError, match=message):
        load(changed_copy(native, tmp_path / "x", edit))


def test_file_that_shrinks_during_the_load_is_one_line(native: Path, tmp_path: Path) -> None:
    folder = changed_copy(native, tmp_path / "x")
    checkpoint = open_checkpoint(folder)
    small = sum(
        one.nbytes for one in describe(checkpoint, config_of(checkpoint)) if one.format is None
    )

    def shrink(done: int, total: int) -> None:
        if done == small:
            (folder / "model.safetensors").write_bytes(b"")

    with pytest.raises(
        UserError, match=r"model.safetensors: truncated: found \d+ bytes, expected at least \d+$"
    ):
        load_weights(checkpoint, config_of(checkpoint), device_of=lambda _: CPU, progress=shrink)


def test_absurd_geometry_is_refused_before_it_costs_time(native: Path, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1024, "n_routed_experts": 2**14, "compress_ratios": [0] * 1024}
    with pytest.raises(UserError, match="expected at most 1000000"):
        load(changed_copy(native, tmp_path / "x", config=config))
