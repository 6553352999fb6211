"""Loading for several ranks: the parts of the whole weights, and no byte of a file read twice."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dsv4.checkpoint import (
    Checkpoint,
    Dialect,
    Layout,
    index,
    load_ranks,
    loading_ranks,
    open_checkpoint,
    pieces,
    tiny_config,
    transfer,
    write_synthetic,
)
from dsv4.checkpoint.load import load_found_ranks
from dsv4.checkpoint.shard import StoredTensor
from dsv4.checkpoint.stored_parameters import find_draft, find_parameters
from dsv4.errors import UserError
from dsv4.parallel.placement import Placement
from dsv4.parallel.sharding import local_config, local_parameters
from dsv4.weights.parameters import Role
from dsv4.weights.quant import QuantTensor
from tests.checkpoint.folders import CPU, Tensors, as_bytes, changed_copy, config_of, load
from tests.ranks.cut_weights import rank_weights

# One layer of each kind of routing and of compression. An inner dimension of which a quarter is one
# group of MXFP4, and a vocabulary that no number of ranks divides.
RAW = tiny_config(
    hidden_size=64,
    num_hidden_layers=2,
    compress_ratios=[128, 4],
    num_hash_layers=1,
    num_attention_heads=8,
    head_dim=32,
    qk_rope_head_dim=16,
    index_head_dim=32,
    o_groups=4,
    o_lora_rank=32,
    moe_intermediate_size=128,
    vocab_size=250,
    num_nextn_predict_layers=0,
)
EVERY_FORM: list[tuple[Layout, Dialect]] = [
    ("nvfp4-experts", Dialect.NATIVE),
    ("nvfp4-experts", Dialect.HF),
    ("nvfp4-all", Dialect.NATIVE),
    ("native", Dialect.NATIVE),
    ("native", Dialect.HYBRID),
    ("bf16", Dialect.NATIVE),
    ("bf16", Dialect.HF),  # fused experts
    ("f32", Dialect.HF),
]


def opened(folder: Path, layout: Layout, names: Dialect, **changes: Any) -> Checkpoint:
    mtp = changes.pop("mtp", None)
    raw = {**RAW, **changes}
    write_synthetic(folder, raw, layout, 5, names=names, mtp=mtp, shard_bytes=200_000)
    return open_checkpoint(folder)


def on_cpu(checkpoint: Checkpoint, ranks: int) -> Placement:
    return Placement.tensor(config_of(checkpoint).num_hidden_layers, [CPU] * ranks)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("layout", "names"), EVERY_FORM)
def test_a_rank_holds_its_part_of_the_whole_weights_bit_for_bit(
    layout: Layout, names: Dialect, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through buffers that are smaller than a row of some matrices."""
    checkpoint = opened(tmp_path / "x", layout, names)
    config = config_of(checkpoint)
    whole = load(tmp_path / "x")
    monkeypatch.setattr(transfer, "STAGING_BYTES", 300)
    loaded = load_ranks(checkpoint, config, on_cpu(checkpoint, ranks))
    assert len(loaded) == ranks
    for rank, weights in enumerate(loaded):
        expected = rank_weights(whole, config, ranks, rank)
        shapes = {name: one.shape for name, one in local_parameters(config, ranks, rank).items()}
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes
        for name, weight in weights.items():
            assert as_bytes(weight) == as_bytes(expected[name]), (rank, name)
    assert local_config(config, ranks).moe_intermediate_size == 128 // ranks


@pytest.mark.parametrize(("layout", "names"), EVERY_FORM)
def test_every_byte_of_the_files_is_read_once(
    layout: Layout, names: Dialect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opened(tmp_path / "x", layout, names)
    read: list[tuple[Path, int, int]] = []
    read_exactly, map_tensor = transfer._read_exactly, index.map_tensor

    def recorded_read(file: Any, offset: int, memory: memoryview) -> None:
        read.append((Path(file.name), offset, offset + len(memory)))
        read_exactly(file, offset, memory)

    def recorded_map(stored: StoredTensor) -> torch.Tensor:
        read.append((stored.file, stored.offset, stored.offset + stored.nbytes))
        return map_tensor(stored)

    monkeypatch.setattr(transfer, "STAGING_BYTES", 1000)
    monkeypatch.setattr(pieces, "GAP", 0)
    monkeypatch.setattr(transfer, "_read_exactly", recorded_read)
    monkeypatch.setattr(index, "map_tensor", recorded_map)
    load_ranks(checkpoint, config_of(checkpoint), on_cpu(checkpoint, 4))
    for file in (tmp_path / "x").glob("*.safetensors"):
        tensors = [tensor for tensor in checkpoint.tensors.values() if tensor.file == file]
        ranges = sorted((start, stop) for name, start, stop in read if name == file)
        assert ranges[0][0] == min(tensor.offset for tensor in tensors)
        assert ranges[-1][1] == file.stat().st_size
        assert [start for start, _ in ranges[1:]] == [stop for _, stop in ranges[:-1]]


def test_progress_counts_every_byte_of_the_files_once(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "x", "nvfp4-experts", Dialect.NATIVE)
    seen: list[tuple[int, int]] = []
    whole = load(tmp_path / "x")
    placement = on_cpu(checkpoint, 2)
    config = config_of(checkpoint)
    with loading_ranks(checkpoint, config, placement, progress=lambda *state: seen.append(state)):
        pass
    input_scales = sum(name.endswith("input_scale") for name in checkpoint.tensors)
    assert input_scales
    weights = sum(weight.nbytes for weight in whole.values())
    assert seen[-1][0] == seen[-1][1] == weights + 4 * input_scales


def test_the_speculative_module_is_cut_as_the_layers_are(tmp_path: Path) -> None:
    module = {"num_nextn_predict_layers": 1, "compress_ratios": [128, 4, 0], "mtp": "classic"}
    checkpoint = opened(tmp_path / "x", "native", Dialect.NATIVE, **module)
    whole = load(tmp_path / "x", mtp="classic")
    config = config_of(checkpoint)
    found = find_draft(checkpoint, config, "classic")
    placement = on_cpu(checkpoint, 2)
    parameters = find_parameters(checkpoint, config, "classic")
    loaded = load_found_ranks(checkpoint, config, parameters, placement)
    alone = load_found_ranks(checkpoint, config, found, placement)
    own = {name for name in whole if name.startswith("mtp.")}
    for rank in range(2):
        expected = rank_weights(whole, config, 2, rank)
        assert set(alone[rank]) == own
        for name in own:
            assert as_bytes(loaded[rank][name]) == as_bytes(expected[name]), name
            assert as_bytes(alone[rank][name]) == as_bytes(expected[name]), name
    assert as_bytes(loaded[0]["mtp.0.attn.wo_b.weight"]) != as_bytes(
        loaded[1]["mtp.0.attn.wo_b.weight"]
    )


def test_small_parameters_of_ranks_do_not_share_memory(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "x", "bf16", Dialect.NATIVE)
    first, second = load_ranks(checkpoint, config_of(checkpoint), on_cpu(checkpoint, 2))
    for name, one in first.items():
        other = second[name]
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            assert one.data_ptr() != other.data_ptr(), name


def test_a_wrong_scale_in_any_part_is_refused(tmp_path: Path) -> None:
    """In the part of the last rank, which no other reads."""
    opened(tmp_path / "x", "native", Dialect.NATIVE)
    name = "layers.1.ffn.experts.7.w1.scale"

    def edit(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8)[-1, 0] = 255

    checkpoint = open_checkpoint(changed_copy(tmp_path / "x", tmp_path / "y", edit))
    with pytest.raises(UserError, match=rf"{name}: found nan at \[127, 0\], expected 0 to 64"):
        load_ranks(checkpoint, config_of(checkpoint), on_cpu(checkpoint, 4))


def test_weights_are_there_when_they_have_been_waited_for(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "x", "nvfp4-experts", Dialect.NATIVE)
    config = config_of(checkpoint)
    whole = load(tmp_path / "x")
    with loading_ranks(checkpoint, config, on_cpu(checkpoint, 2)) as loading:
        for rank, weights in enumerate(loading.ranks):
            expected = rank_weights(whole, config, 2, rank)
            for name, weight in weights.items():
                loading.wait(name)
                assert as_bytes(weight) == as_bytes(expected[name]), (rank, name)


def test_what_has_been_taken_is_let_go_beside_the_load(tmp_path: Path) -> None:
    """Else a device would hold every weight as stored and packed when all are packed."""
    checkpoint = opened(tmp_path / "x", "nvfp4-experts", Dialect.NATIVE)
    with loading_ranks(checkpoint, config_of(checkpoint), on_cpu(checkpoint, 1)) as loading:
        (weights,) = loading.ranks
        taken = []
        for name in list(weights):
            weight = weights.pop(name)
            loading.wait(name)
            data = weight.data if isinstance(weight, QuantTensor) else weight
            taken.append((name, StorageWeakRef(data.untyped_storage())))
            del weight, data
        assert [name for name, storage in taken if not storage.expired()] == []


def test_parameters_that_nobody_wants_are_not_read(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "x", "nvfp4-experts", Dialect.NATIVE)
    seen: list[tuple[int, int]] = []
    with loading_ranks(
        checkpoint,
        config_of(checkpoint),
        on_cpu(checkpoint, 1),
        progress=lambda *state: seen.append(state),
        is_unneeded=lambda parameter: parameter.role is Role.EXPERT,
    ) as loading:
        (weights,) = loading.ranks
    assert not any(".experts." in name and "shared" not in name for name in weights)
    assert seen[-1][1] == sum(weight.nbytes for weight in weights.values())


def test_a_wrong_scale_reaches_what_waits_for_it(tmp_path: Path) -> None:
    opened(tmp_path / "x", "native", Dialect.NATIVE)
    name = "layers.1.ffn.experts.7.w1.scale"

    def edit(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8)[-1, 0] = 255

    checkpoint = open_checkpoint(changed_copy(tmp_path / "x", tmp_path / "y", edit))
    placement = on_cpu(checkpoint, 2)
    with (
        pytest.raises(UserError, match=rf"{name}: found nan at \[127, 0\], expected 0 to 64"),
        loading_ranks(checkpoint, config_of(checkpoint), placement) as loading,
    ):
        loading.wait("layers.1.ffn.experts.w1.weight")
    assert not any(thread.name.startswith("dsv4-load") for thread in threading.enumerate())


def test_a_model_that_cannot_be_cut_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opened(tmp_path / "x", "native", Dialect.NATIVE, moe_intermediate_size=64)
    monkeypatch.setattr(index, "map_tensor", None)
    expected = r"found 4 .*expected 2 \(layers.0.ffn.experts.w2.weight: .*multiples of 32\)"
    with pytest.raises(UserError, match=expected):
        load_ranks(checkpoint, config_of(checkpoint), on_cpu(checkpoint, 4))


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "names"), EVERY_FORM)
def test_gpus_get_the_same_parts(
    layout: Layout, names: Dialect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every GPU, some as two ranks."""
    checkpoint = opened(tmp_path / "x", layout, names)
    config = config_of(checkpoint)
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", rank % count) for rank in range(4)]
    whole = load(tmp_path / "x")
    monkeypatch.setattr(transfer, "STAGING_BYTES", 1000)
    placement = Placement.tensor(config.num_hidden_layers, devices)
    for rank, weights in enumerate(load_ranks(checkpoint, config, placement)):
        for name, expected in rank_weights(whole, config, 4, rank).items():
            assert weights[name].device == devices[rank]
            assert as_bytes(weights[name]) == as_bytes(expected), (rank, name)


def test_every_role_is_loaded(tmp_path: Path) -> None:
    """What the tests above compare has plain parameters among it, cut and whole."""
    found = local_parameters(config_of(opened(tmp_path / "x", "bf16", Dialect.NATIVE)), 4, 0)
    assert {parameter.role for parameter in found.values()} == set(Role)
