"""What steps take, known before any weight is read: memory that holds for every length, and every
kernel.
"""

from dataclasses import replace

import pytest
import torch

from dsv4.checkpoint import geometry_config
from dsv4.checkpoint.layouts import format_in
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.launch.items import Launch
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.signature import signature
from dsv4.launch.workspace import lay_out
from dsv4.ops.tables import CUDA_TABLE
from dsv4.parallel.placement import Placement
from dsv4.plan import plan_memory
from dsv4.step.kernel_names import kernels_of
from dsv4.step.planned import PlannedSteps, planned_weight
from dsv4.weights.parameters import Role, parameters
from dsv4.weights.quant import QuantTensor
from tests.launch.simulated_memory import assert_buffers_survive
from tests.ops.cases import tiny_config
from tests.step.planned_model import GPUS, TARGETS, PlannedModel, demo, geometry

CONFIG = ModelConfig.from_dict(geometry_config("v4-flash", 6))
STORED = [(p, format_in("nvfp4-experts", p)) for p in parameters(CONFIG).values()]
TWO_GPUS = Placement.of_layers((*[GPUS[0]] * 3, *[GPUS[1]] * 3))


def planned_steps(engine: EngineConfig, max_context: int = 4096) -> PlannedSteps:
    targets = {device: TARGETS[device] for device in GPUS[:2]}
    engine = replace(engine, max_context=max_context)
    return PlannedSteps.of(CONFIG, engine, STORED, CUDA_TABLE, targets, TWO_GPUS)


def test_the_longest_steps_are_planned() -> None:
    def lengths(chunk: int, context: int = 4096) -> list[int]:
        steps = planned_steps(EngineConfig(prefill_chunk=chunk), context).steps
        return [step.tokens for step in steps]

    assert lengths(512) == [1, 8, 512]
    assert lengths(512, context=100) == [1, 8, 100]
    assert lengths(8) == [1, 8]
    assert lengths(3) == [1, 3, 8]


def test_the_workspace_is_that_of_the_largest_step() -> None:
    planned = planned_steps(EngineConfig(prefill_chunk=512))
    sizes = [step.workspace_bytes() for step in planned.steps]
    assert planned.workspace_bytes() == {
        device: max(size[device] for size in sizes) for device in GPUS[:2]
    }
    longest = planned.steps[-1].recordings[GPUS[0]]
    assert planned.workspace_bytes()[GPUS[0]] == lay_out(longest).nbytes


@pytest.mark.parametrize("key", ["hidden_size", "q_lora_rank", "head_dim"])
def test_prompts_of_models_with_odd_widths_are_recorded(key: str) -> None:
    """Rows of an odd product are padded; those who read it take rows without gaps."""
    widths = {"num_attention_heads": 1, "o_groups": 1, "qk_rope_head_dim": 8, key: 33}
    config = tiny_config(**widths)
    stored = [(p, format_in("bf16", p)) for p in parameters(config).values()]
    devices = tuple(GPUS[:1] * config.num_hidden_layers)
    model = PlannedModel.of(config, stored, devices, EngineConfig(max_context=64))
    for tokens in (1, 9):
        model.record(tokens)


def test_steps_apart_have_memory_of_their_own() -> None:
    planned = planned_steps(EngineConfig(prefill_chunk=512))
    shared = planned.workspace_bytes()
    own = planned.steps[0].workspace_bytes()
    found = replace(planned, apart=planned.steps[:1]).workspace_bytes()
    assert found == {device: shared[device] + own[device] for device in GPUS[:2]}


def test_what_other_devices_hold_of_the_head_is_planned() -> None:
    engine = EngineConfig(prefill_chunk=512, max_context=4096)
    steps = planned_steps(engine)
    share = 64_128 * CONFIG.hidden_size * 2
    assert steps.head_bytes == {GPUS[0]: share}
    found, without = (
        plan_memory(CONFIG, engine, TWO_GPUS, [], planned, 10**12).devices
        for planned in (steps, replace(steps, head_bytes={}))
    )
    held = [
        one.weight_bytes - other.weight_bytes for one, other in zip(found, without, strict=True)
    ]
    assert held == [share, 0]


def test_kernels_of_all_steps_are_known() -> None:
    planned = planned_steps(EngineConfig(prefill_chunk=512))
    assert planned.kernels() == {kernel for step in planned.steps for kernel in step.kernels()}
    assert {architecture for _, architecture in planned.kernels()} == {"sm_90a"}
    functions = {kernel.function for kernel, _ in planned.kernels()}
    assert {"moe_decode", "prefill_linear", "embed", "next_positions", "hc_post"} <= functions
    assert {"take_tokens", "send_rows", "receive_rows", "store_token"} <= functions


def test_planned_weights_have_shapes_and_formats_without_memory() -> None:
    for parameter, format in STORED:
        weight = planned_weight(parameter, format)
        if isinstance(weight, QuantTensor):
            assert weight.format is format
            assert weight.shape == parameter.shape
            assert weight.data.is_meta
        else:
            assert weight.is_meta
            assert tuple(weight.shape) == parameter.shape
            assert (weight.dtype == torch.int64) == (parameter.role is Role.TABLE)


def assert_steps_fit(planned: PlannedModel) -> None:
    """Every decode length into the memory of 1 and 8 tokens, and no buffer into another."""
    sizes = {}
    for tokens in (*range(1, 9), 512):
        step = planned.record(tokens)
        sizes[tokens] = step.workspace_bytes()
        for device, recording in step.recordings.items():
            layout = lay_out(recording)
            assert layout.nbytes == sizes[tokens][device]
            assert_buffers_survive(recording, layout)
    for device in planned.state.devices:
        largest = max(sizes[1][device], sizes[8][device])
        assert all(sizes[tokens][device] <= largest for tokens in range(1, 9))


def test_no_buffer_of_a_step_lies_in_another_that_is_alive() -> None:
    assert_steps_fit(demo(2))
    assert_steps_fit(geometry("v4-flash", layers=5, gpus=2))
    assert_steps_fit(geometry("v4-pro", layers=4))


def test_traced_values_and_outputs_survive_to_the_end() -> None:
    planned = geometry("v4-flash", layers=4, gpus=2)
    step = planned.record_traced(5)
    for recording in step.recordings.values():
        assert_buffers_survive(recording, lay_out(recording))


def test_a_deeper_model_needs_no_more_workspace() -> None:
    few = geometry("v4-flash", layers=6)
    many = geometry("v4-flash", layers=24)
    for tokens in (1, 8, 512):
        assert few.record(tokens).workspace_bytes() == many.record(tokens).workspace_bytes()


def test_a_launch_has_kernels_of_one_list_of_parameters() -> None:
    """The driver takes its arguments by their places, whichever kernel there is for a length."""
    longest, other = (
        Shape(Kernel(source, function), 1, 32)
        for source, function in (("norm/rms_norm", "rms_norm"), ("exchange/exchange", "next_step"))
    )
    declared = signature("norm/rms_norm", "rms_norm")
    launch = Launch(declared, longest, {}, lambda n: other if n < 100 else longest, longest)
    assert kernels_of([replace(launch, shape_of=None)], 512) == {longest.kernel}
    with pytest.raises(TypeError, match="next_step: found other parameters, expected those of rms"):
        kernels_of([launch], 512)
