"""Memory plan: the numbers are what is allocated, and the refusal is one line."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4 import plan
from dsv4.caches.allocation import layer_state_bytes
from dsv4.caches.state import DecodeState
from dsv4.checkpoint import ParameterDescription
from dsv4.checkpoint import tiny_config as tiny_raw_config
from dsv4.checkpoint.staging import staging_bytes
from dsv4.config import ModelConfig
from dsv4.demo import CHECKPOINT
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.ops import TORCH_PACKING
from dsv4.ops.torch_workspace import TorchStep
from dsv4.ops.trees import tensors_in
from dsv4.parallel.placement import Placement
from dsv4.parallel.received_bytes import arrival_bytes, channel_bytes
from dsv4.plan import max_context_tokens, plan_memory
from dsv4.weights.packing_bytes import dequantized_bytes, dequantizing_bytes
from dsv4.weights.parameters import Role, parameters
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.ops.cases import tiny_config

MATRIX_ROLES = (Role.LINEAR, Role.EXPERT, Role.FLOOR)
ENGINES = [
    EngineConfig(max_context=300),
    EngineConfig(
        max_context=4096,
        kv_dtype="bf16",
        index_dtype="bf16",
        compute_dtype="float32",
        prefill_chunk=7,
    ),
    EngineConfig(max_context=1, kv_dtype="bf16", index_dtype="fp8", prefill_chunk=1),
]


def stored_checkpoint(
    config: ModelConfig, mtp: bool = False, format: QuantFormat = QuantFormat.BF16
) -> list[ParameterDescription]:
    return [
        ParameterDescription(
            p, format if p.role in MATRIX_ROLES else None, 2 * torch.Size(p.shape).numel()
        )
        for p in parameters(config, "classic" if mtp else None).values()
    ]


def two_devices(config: ModelConfig) -> Placement:
    """Distinct devices that exist everywhere; the second is never allocated on."""
    return Placement.pipeline(
        [1] * config.num_hidden_layers, [torch.device("cpu"), torch.device("meta")]
    )


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available_bytes", lambda device: 1 << 40)


@pytest.mark.parametrize("engine", ENGINES, ids=["fp8", "float32", "mixed"])
def test_state_bytes_are_what_the_state_allocates(engine: EngineConfig) -> None:
    config = tiny_config()
    placement = two_devices(config)
    planned = plan_memory(config, engine, placement, [], None)
    state = DecodeState.allocate(config, engine, planned.max_context, (torch.device("cpu"),) * 4)
    sizes = [bytes_of(layer) for layer in state.layers]
    for device in planned.devices:
        layers = [
            index for index, owner in enumerate(placement.layer_devices) if owner == device.device
        ]
        assert device.layers == len(layers)
        arriving = channel_bytes(config, engine, placement)[device.device]
        if device.device.type == "meta":
            arriving += arrival_bytes(config, engine)
        assert device.state_bytes == sum(sizes[layer] for layer in layers) + arriving
    channels = sum(channel_bytes(config, engine, placement).values())
    in_all = sum(sizes) + arrival_bytes(config, engine) + channels
    assert sum(device.state_bytes for device in planned.devices) == in_all


def test_every_boundary_counts_its_hand_off_once() -> None:
    """One arrival memory per pair of devices, on the one that receives, however many layers send to
    it.
    """
    config = tiny_config()
    engine = EngineConfig(prefill_chunk=100, max_context=300)
    devices = [torch.device("cpu"), torch.device("meta")]
    alone = plan_memory(config, engine, Placement.of_layers((devices[0],) * 4), [], None)
    one = sum(device.state_bytes for device in alone.devices)
    slots = 100 * config.hc_mult * config.hidden_size * 2
    for placement, pairs in (
        (Placement.pipeline([1] * 4, devices), 1),
        (Placement.round_robin(4, devices), 2),
    ):
        planned = plan_memory(config, engine, placement, [], None)
        found = sum(device.state_bytes for device in planned.devices)
        channels = sum(channel_bytes(config, engine, placement).values())
        assert found == one + pairs * slots + channels


def bytes_of(value: object) -> int:
    """Of the tensors inside, each counted once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_in(value)}.values())


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_layer_state_bytes_allocate_nothing_at_a_million_tokens(ratio: int) -> None:
    """584 bytes per window slot and compressed entry, 132 per index key, float32 rings."""
    engine = EngineConfig(max_context=1 << 20, index_dtype="fp8", prefill_chunk=512)
    found = layer_state_bytes(tiny_config(max_position_embeddings=1 << 20), engine, 1 << 20, ratio)
    expected = (128 + 512 + 8) * 584
    if ratio:
        expected += ((1 << 20) // ratio + 1) * 584
        expected += 2 * 4 * ((8 + 11) * 1024 if ratio == 4 else (128 + 11) * 512)
    if ratio == 4:
        expected += ((1 << 20) // 4 + 1) * 132 + 2 * 4 * (8 + 11) * 256
    assert found == expected


def test_weights_are_counted_where_they_go() -> None:
    config = tiny_config()
    placement = two_devices(config)
    stored = stored_checkpoint(config, mtp=True)
    planned = plan_memory(config, EngineConfig(), placement, stored, None)
    for device in planned.devices:
        owned = [d for d in stored if placement.device_of(d.parameter.name) == device.device]
        assert device.weight_bytes == sum(d.nbytes for d in owned)
        assert device.ops_bytes == sum(dequantized_bytes(d.parameter) for d in owned)
        assert (
            device.total_bytes - device.work_bytes
            == device.weight_bytes + device.ops_bytes + device.state_bytes
        )
    assert sum(device.weight_bytes for device in planned.devices) == sum(d.nbytes for d in stored)


def test_work_of_the_torch_ops_is_the_largest_dequantizing_or_step() -> None:
    config = tiny_config(compress_ratios=[4, 128, 0, 0])
    stored = stored_checkpoint(config, format=QuantFormat.FP8_BLOCK128)
    placement = Placement.of_layers((torch.device("cpu"),) * 4)
    found = []
    for chunk in (8, 16_000):
        engine = EngineConfig(prefill_chunk=chunk, max_context=4096)
        (planned,) = plan_memory(config, engine, placement, stored, None).devices
        packing = max(dequantizing_bytes(d.parameter, d.format) for d in stored)
        packing += staging_bytes(sum(d.nbytes for d in stored))
        tokens = min(max(chunk, 8), 4096)
        steps = [TorchStep(config, 2, tokens, 4096, ratio) for ratio in config.compress_ratios]
        most = max(step.workspace for step in steps)
        assert planned.work_bytes == max(packing, most)
        found.append(packing > most)
    assert found == [True, False]


def test_the_caches_of_a_draft_module_are_on_the_last_device() -> None:
    """Also where that has one layer and the others have more."""
    config = tiny_config()
    cpu, last = torch.device("cpu"), torch.device("meta")
    layers = config.num_hidden_layers
    for placement in (two_devices(config), Placement.of_layers([cpu] * (layers - 1) + [last])):
        without, with_draft = (
            plan_memory(config, EngineConfig(), placement, [], None, draft_bytes=nbytes)
            for nbytes in (0, 1000)
        )
        pairs = zip(without.devices, with_draft.devices, strict=True)
        assert [after.state_bytes - before.state_bytes for before, after in pairs] == [0, 1000]


def test_a_device_works_with_the_longest_of_the_recorded_steps() -> None:
    """It is more than packing takes, or less."""
    config = tiny_config()
    gpus = [torch.device("cuda", index) for index in range(2)]
    placement = Placement.pipeline([1] * config.num_hidden_layers, gpus)
    steps: Any = SimpleNamespace(
        packing=SimpleNamespace(native=None),
        workspace_bytes=lambda: {gpus[0]: 10**9, gpus[1]: 0},
        head_bytes={},
    )
    stored = stored_checkpoint(config)
    planned = plan_memory(config, EngineConfig(), placement, stored, steps, 10**10)
    first, second = (device.work_bytes - plan.CUDA_RESERVE_BYTES for device in planned.devices)
    assert first == 10**9
    assert 0 < second < 10**8


def test_dequantized_bytes_are_those_of_the_torch_ops_weights() -> None:
    dspark = {
        "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
        "dspark_block_size": 5,
        "dspark_noise_token_id": 200,
        "dspark_target_layer_ids": [1, 2, 3],
        "dspark_markov_rank": 32,
    }
    config = ModelConfig.from_dict(tiny_raw_config(**dspark))
    listed = {**parameters(config, "classic"), **parameters(config, "dspark")}
    for parameter in listed.values():
        expected = 0
        looked_up = ("embed.weight", "markov_w1.weight")
        if parameter.role in MATRIX_ROLES and not parameter.name.endswith(looked_up):
            stored = QuantTensor.dense(torch.zeros(parameter.shape, dtype=torch.bfloat16))
            expected = TORCH_PACKING.pack_weight(stored).nbytes
        assert dequantized_bytes(parameter) == expected, parameter.name


def test_a_plan_that_does_not_fit_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    stored = stored_checkpoint(config)
    placement = two_devices(config)
    fitting = plan_memory(config, EngineConfig(), placement, stored, None)
    fitting.refuse_if_too_large()
    needed = fitting.devices[1].total_bytes
    for available, fits in ((needed, True), (needed - 1, False)):
        limits = {torch.device("cpu"): 1 << 40, torch.device("meta"): available}
        monkeypatch.setattr(plan, "available_bytes", limits.__getitem__)
        planned = plan_memory(config, EngineConfig(), placement, stored, None)
        assert planned.fits is fits
        assert [device.fits for device in planned.devices] == [True, fits]
    advice = "EngineConfig.max_context or EngineConfig.prefill_chunk"
    with pytest.raises(UserError, match=rf"^memory: meta needs .* MiB .*{advice}$") as caught:
        planned.refuse_if_too_large()
    assert "\n" not in str(caught.value)


def test_the_table_names_every_device_and_the_one_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        plan, "available_bytes", lambda device: 1 << 40 if device.type == "cpu" else 0
    )
    config = tiny_config()
    lines = str(
        plan_memory(config, EngineConfig(max_context=2048), two_devices(config), [], None)
    ).splitlines()
    assert "2,048 tokens" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["device", "cpu", "meta"]
    assert [line.endswith("does not fit") for line in lines[2:]] == [False, True]


def test_the_table_has_both_units() -> None:
    """3 GB are 2.794 GiB."""
    device = torch.device("cpu")
    sizes = [part * 10**9 for part in (1, 2, 3, 4, 20)]
    table = plan.MemoryPlan((plan.DevicePlan(device, 1, *sizes),), 100, staging_bytes=3 << 29)
    title, header, row, staging = str(table).splitlines()
    assert title == "memory plan in GiB (2^30 bytes; GB are 10^9) for a context of 100 tokens"
    parts = ["device", "layers", "weights", "ops", "state", "work"]
    assert header.split() == [*parts, "total", "available", "total", "GB", "avail.", "GB"]
    in_gib = ["0.931", "1.863", "2.794", "3.725", "9.313", "18.626"]
    assert row.split() == ["cpu", "1", *in_gib, "10.000", "20.000"]
    assert staging == "loading takes 1.500 GiB of pinned memory on the host"


def test_plan_of_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without GPUs, or with others: nothing is asked of CUDA."""

    def asked(*_: object) -> None:
        raise AssertionError("CUDA was asked")

    for name in ("device_count", "get_device_properties", "get_device_capability", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, asked)
    for ops in ("auto", "torch"):
        planned = Engine.plan(CHECKPOINT, EngineConfig(gpus=2, ops=ops), gpu_memory=2 * 10**9)
        assert [str(device.device) for device in planned.devices] == ["cuda:0", "cuda:1"]
        assert [device.available_bytes for device in planned.devices] == [2 * 10**9] * 2
        assert [device.ops_bytes > 0 for device in planned.devices] == [ops == "torch"] * 2
        assert planned.fits
    small = Engine.plan(CHECKPOINT, EngineConfig(gpus=2), gpu_memory=10**8)
    assert not small.fits
    with pytest.raises(UserError, match="EngineConfig.device: found 'cpu' in the plan of GPUs"):
        Engine.plan(CHECKPOINT, EngineConfig(device="cpu"), gpu_memory=10**9)


@pytest.mark.parametrize("gpu_memory", [0, -1, 1.5, True, "80"])
def test_gpu_memory_is_a_number_of_bytes(gpu_memory: Any) -> None:
    found = f"gpu_memory: found {gpu_memory!r}, expected an integer of at least 1"
    with pytest.raises(UserError, match=found):
        Engine.plan(CHECKPOINT, EngineConfig(), gpu_memory)


def test_context_defaults_to_the_models_own_up_to_8192_and_is_bounded_by_it() -> None:
    assert max_context_tokens(tiny_config(), EngineConfig()) == 4096
    assert max_context_tokens(tiny_config(max_position_embeddings=1 << 20), EngineConfig()) == 8192
    assert (
        max_context_tokens(
            tiny_config(max_position_embeddings=1 << 20), EngineConfig(max_context=1 << 20)
        )
        == 1 << 20
    )
    with pytest.raises(
        UserError, match=r"EngineConfig.max_context: found 4097, expected at most 4096"
    ):
        max_context_tokens(tiny_config(), EngineConfig(max_context=4097))
