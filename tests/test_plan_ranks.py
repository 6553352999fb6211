"""Memory plan of ranks that share every layer: what each of them holds, and whether it fits."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsv4 import plan
from dsv4.checkpoint import (
    Geometry,
    Layout,
    ParameterDescription,
    geometry_config,
    held_by,
    open_checkpoint,
    tiny_config,
    write_synthetic,
)
from dsv4.checkpoint.load import descriptions, load_found_ranks
from dsv4.checkpoint.stored_parameters import find_parameters
from dsv4.config import ModelConfig
from dsv4.demo import CHECKPOINT
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.launch.target import Target
from dsv4.ops.tables import TABLES, RecordedTable
from dsv4.parallel.placement import Placement
from dsv4.parallel.received_bytes import exchange_bytes
from dsv4.parallel.sharding import cut_of
from dsv4.plan import MemoryPlan, plan_memory
from dsv4.step.planned import PlannedSteps
from dsv4.weights.codes import e8m0_to_float
from dsv4.weights.parameters import parameters
from tests.checkpoint.folders import CPU, Tensors, changed_copy
from tests.test_plan_native import described

GPUS = [torch.device("cuda", index) for index in range(8)]


def tensor_plan(name: Geometry, ranks: int, gigabytes: int) -> MemoryPlan:
    """NVIDIA's mix of a published geometry, with recorded steps."""
    config = ModelConfig.from_dict(geometry_config(name))
    stored = [described(parameter) for parameter in parameters(config).values()]
    engine = EngineConfig(parallel="tensor", gpus=ranks, prefill_chunk=4096, max_context=8192)
    placement = Placement.tensor(config.num_hidden_layers, GPUS[:ranks])
    table = TABLES["cuda"]
    assert isinstance(table, RecordedTable)
    steps = PlannedSteps.of(
        config,
        engine,
        [(parameter, format) for parameter, format, _ in held_by(stored, ranks, 0)],
        table,
        {GPUS[0]: Target.of_absent(GPUS[0])},
        placement,
    )
    return plan_memory(config, engine, placement, stored, steps, gigabytes * 10**9)


@pytest.mark.parametrize(
    ("name", "ranks", "weights", "fits"),
    [("v4-flash", 2, 83, True), ("v4-pro", 8, 117, True), ("v4-pro", 4, 228, False)],
)
def test_pro_fits_eight_gpus_of_150_gb_and_no_fewer(
    name: Geometry, ranks: int, weights: int, fits: bool
) -> None:
    planned = tensor_plan(name, ranks, 150)
    assert planned.fits is fits
    assert [device.device for device in planned.devices] == GPUS[:ranks]
    assert {device.weight_bytes // 10**9 for device in planned.devices} == {weights}
    if not fits:
        refused = r"^memory: rank 0 \(cuda:0\) needs [0-9,]+ MiB \(weights [0-9,]+, .*use more GPUs"
        with pytest.raises(UserError, match=refused):
            planned.refuse_if_too_large()


def with_float32_scales(tensors: Tensors) -> None:
    """FP8 block scales as base models have them."""
    for name, weight in list(tensors.items()):
        if weight.dtype == torch.float8_e4m3fn:
            scale = name.removesuffix("weight") + "scale"
            tensors[scale] = e8m0_to_float(tensors[scale])


@pytest.mark.parametrize(
    ("layout", "edit"),
    [
        ("nvfp4-experts", None),
        ("native", None),
        ("native", with_float32_scales),
        ("bf16", None),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_planned_weights_are_those_that_are_loaded(
    layout: Layout, edit: Callable[[Tensors], None] | None, ranks: int, tmp_path: Path
) -> None:
    raw = tiny_config(num_attention_heads=8, o_groups=4, moe_intermediate_size=128, vocab_size=250)
    folder = tmp_path / "x"
    write_synthetic(folder, raw, layout, 1, mtp="classic")
    if edit is not None:
        folder = changed_copy(folder, tmp_path / "y", edit)
    checkpoint = open_checkpoint(folder)
    config = ModelConfig.from_dict(raw)
    placement = Placement.tensor(config.num_hidden_layers, [CPU] * ranks)
    found = find_parameters(checkpoint, config, "classic")
    stored = descriptions(found)
    planned = plan_memory(config, EngineConfig(), placement, stored, None)
    loaded = load_found_ranks(checkpoint, config, found, placement)
    for device, weights in zip(planned.devices, loaded, strict=True):
        sizes = {name: weight.nbytes for name, weight in weights.items()}
        held = held_by(stored, ranks, device.rank or 0)
        assert {one.parameter.name: one.nbytes for one in held} == sizes
        assert device.weight_bytes == sum(sizes.values())


def test_what_is_not_cut_counts_on_every_rank() -> None:
    """The embedding and everything else that is whole; and the whole state, with the inboxes."""
    config = ModelConfig.from_dict(geometry_config("v4-flash", 3))
    stored = [described(parameter) for parameter in parameters(config).values()]
    engine = EngineConfig(prefill_chunk=512, max_context=4096)
    (alone,) = plan_memory(config, engine, on(CPU, 1, config), stored, None, 10**12).devices
    ranks = plan_memory(config, engine, on(CPU, 8, config), stored, None, 10**12).devices
    whole = sum(one.nbytes for one in stored if cut_of(one.parameter, 8, 0) is None)
    # An NVFP4 expert's parts have the 4 bytes of its global scale each.
    global_scales = 4 * 3 * 3 * config.n_routed_experts
    expected = alone.weight_bytes + 7 * (whole + global_scales)
    assert sum(device.weight_bytes for device in ranks) == expected
    exchange = exchange_bytes(config, engine, 8)
    inbox = 8 * 4 * 8 * 8 * (129_280 // 8)
    assert exchange == inbox + 512 * ((4 * 2 + 2) * 4096 + 8 * 512)
    assert {device.state_bytes - exchange for device in ranks} == {alone.state_bytes}
    assert alone.rank is None
    assert [device.rank for device in ranks] == list(range(8))


def on(device: torch.device, ranks: int, config: ModelConfig) -> Placement:
    return Placement.tensor(config.num_hidden_layers, [device] * ranks)


def test_every_rank_has_the_caches_of_a_draft_module() -> None:
    config = ModelConfig.from_dict(tiny_config())
    placement = on(CPU, 2, config)
    without, with_draft = (
        plan_memory(config, EngineConfig(), placement, [], None, draft_bytes=nbytes).devices
        for nbytes in (0, 1000)
    )
    pairs = zip(without, with_draft, strict=True)
    assert [after.state_bytes - before.state_bytes for before, after in pairs] == [1000, 1000]


def test_ranks_on_one_device_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available_bytes", lambda device: 1000)
    config = ModelConfig.from_dict(tiny_config())
    stored: list[ParameterDescription] = []
    for ranks in (1, 2, 4):
        planned = plan_memory(config, EngineConfig(), on(CPU, ranks, config), stored, None)
        assert [device.available_bytes for device in planned.devices] == [1000 // ranks] * ranks


def test_the_table_names_ranks_and_a_checkpoint_that_cannot_be_cut_is_refused() -> None:
    engine = EngineConfig(parallel="tensor", gpus=2)
    planned = Engine.plan(CHECKPOINT, engine, gpu_memory=2 * 10**9)
    assert planned.fits
    *rows, staging = str(planned).splitlines()[1:]
    assert re.fullmatch(r"loading takes 0\.\d\d\d GiB of pinned memory on the host", staging)
    assert [row.split("  ")[0] for row in rows] == ["device", "rank 0 (cuda:0)", "rank 1 (cuda:1)"]
    assert len({len(row) for row in rows}) == 1
    four = EngineConfig(parallel="tensor", gpus=4)
    with pytest.raises(UserError, match=r"found 4 with .*expected 2 \(o_groups is 2\)$"):
        Engine.plan(CHECKPOINT, four, gpu_memory=10**9)
