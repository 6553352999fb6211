"""Memory plan of native copies: all of them are counted, or the refusal has the numbers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.checkpoint import Geometry, ParameterDescription, geometry_config
from dsv4.checkpoint.layouts import format_in
from dsv4.checkpoint.staging import staging_on
from dsv4.config import ModelConfig
from dsv4.demo import CHECKPOINT
from dsv4.engine import Engine
from dsv4.engine_config import ActivationMode, EngineConfig
from dsv4.errors import UserError
from dsv4.ops.tables import NATIVE_TABLES
from dsv4.parallel.placement import Placement
from dsv4.plan import CUDA_RESERVE_BYTES, plan_memory
from dsv4.weights.packing_bytes import native_copy_bytes, packing_with_native_bytes
from dsv4.weights.parameters import Parameter, parameters
from dsv4.weights.quant import packed_bytes

# Geometry, GPUs and GB of each, activations, whether it fits.
CASES: list[tuple[Geometry, int, int, ActivationMode, bool]] = [
    ("v4-pro", 8, 180, "bf16", True),
    ("v4-pro", 8, 180, "nvfp4", False),
    ("v4-pro", 8, 288, "nvfp4", True),
    ("v4-flash", 2, 180, "nvfp4", True),
    ("v4-flash", 2, 180, "fp8", True),
]


def test_native_copies_are_counted_and_refused_with_numbers() -> None:
    """Pro's experts twice need GPUs of more than 180 GB, eight of them; Flash's fit two."""
    for name, count, memory, mode, fits in CASES:
        config = ModelConfig.from_dict(geometry_config(name))
        devices = [torch.device("cuda", index) for index in range(count)]
        placement = Placement.pipeline([1] * config.num_hidden_layers, devices)
        stored = [described(parameter) for parameter in parameters(config).values()]
        packing = NATIVE_TABLES[mode].packing
        workspace = dict.fromkeys(devices, 1 << 30)
        head_bytes = {devices[0]: 1000}
        steps: Any = SimpleNamespace(
            packing=packing, workspace_bytes=lambda it=workspace: it, head_bytes=head_bytes
        )
        planned = plan_memory(config, EngineConfig(), placement, stored, steps, memory * 10**9)
        assert planned.fits is fits, (name, memory, mode, str(planned))
        assert all((device.ops_bytes > 0) == (mode != "bf16") for device in planned.devices)
        assert planned.native_copies is (mode != "bf16")
        size = sum(one.nbytes for one in stored)
        assert sum(device.weight_bytes for device in planned.devices) == size + 1000
        if planned.native_copies:
            copies = sum(native_copy_bytes(*one[:2], nvfp4=mode == "nvfp4") for one in stored)
            assert sum(device.ops_bytes for device in planned.devices) == copies
            packed = max(packing_with_native_bytes(*one) for one in stored)
            work = packed + staging_on(devices[0], size) + CUDA_RESERVE_BYTES
            assert [device.work_bytes for device in planned.devices] == [work] * count
        if not fits:
            with pytest.raises(UserError, match=r"ops [0-9,]+, .*prefill_activations='bf16'"):
                planned.refuse_if_too_large()


def test_a_plan_without_native_kernels_refuses_their_activations() -> None:
    """GPUs that need not be there are Hopper's: a plan would lack the copies."""
    for mode in ("fp8", "nvfp4"):
        native = EngineConfig(prefill_activations=mode)
        with pytest.raises(UserError, match=f"prefill_activations: found '{mode}' in the plan of"):
            Engine.plan(CHECKPOINT, native, gpu_memory=10**10)
        assert Engine.plan(CHECKPOINT, replace(native, ops="torch"), gpu_memory=10**10).fits


def described(parameter: Parameter) -> ParameterDescription:
    """A parameter of NVIDIA's mix: NVFP4 experts, FP8 linears."""
    format = format_in("nvfp4-experts", parameter)
    nbytes = 4 * torch.Size(parameter.shape).numel()
    if format is not None:
        nbytes = packed_bytes(format, parameter.shape)
    return ParameterDescription(parameter, format, nbytes)
