"""Op tables of a configuration: quantised activations run where something computes them."""

import pytest
import torch

from dsv4 import EngineConfig
from dsv4.command.errors import user_message
from dsv4.engine_config import ActivationMode
from dsv4.errors import UserError
from dsv4.native.form import NativeForm
from dsv4.ops.tables import CUDA_TABLE, TORCH_TABLE, DirectTable
from dsv4.parallel import devices
from dsv4.parallel.devices import table_on
from dsv4.weights.quant import QuantFormat
from dsv4.weights.quantize import quantize

CPU = [torch.device("cpu")]
GPU = [torch.device("cuda", 0)]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def test_the_torch_ops_emulate_every_mode() -> None:
    weight = quantize(torch.ones(32, 128), QuantFormat.FP8_BLOCK128)
    for device in (CPU, GPU):
        types = {
            mode: type(torch_weights(mode, device).packing.pack_weight(weight)).__name__
            for mode in ("bf16", "fp8", "nvfp4")
        }
        assert types == {
            "bf16": "QuantTensor",
            "fp8": "EmulatedWeight",
            "nvfp4": "EmulatedWeight",
        }


def torch_weights(mode: ActivationMode, device: list[torch.device]) -> DirectTable:
    table = table_on(EngineConfig(ops="torch", prefill_activations=mode), device)
    assert isinstance(table, DirectTable)
    return table


@pytest.mark.parametrize("mode", ["fp8", "nvfp4"])
@pytest.mark.parametrize("ops", ["auto", "cuda"])
def test_cuda_ops_without_native_kernels_are_refused_in_one_line(
    hopper: None, mode: ActivationMode, ops: str
) -> None:
    engine = EngineConfig(ops="auto" if ops == "auto" else "cuda", prefill_activations=mode)
    with pytest.raises(UserError) as refused:
        table_on(engine, GPU)
    assert user_message(refused.value) == (
        f"--prefill-activations: found '{mode}' with the CUDA ops on cuda:0 (NVIDIA X), expected "
        "native kernels, which are made for Blackwell; --ops torch emulates them"
    )
    assert table_on(EngineConfig(ops=engine.ops), GPU)


def test_cuda_ops_need_a_gpu() -> None:
    with pytest.raises(UserError) as refused:
        table_on(EngineConfig(ops="cuda"), CPU)
    assert user_message(refused.value) == (
        "--ops: found 'cuda' on the CPU, expected 'torch' or a CUDA device"
    )


def test_ops_that_are_asked_for_are_no_native_ones(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "native_or_portable", None)
    assert table_on(EngineConfig(ops="cuda"), GPU) is CUDA_TABLE


def test_native_kernels_may_have_quantised_activations(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = NativeForm(TORCH_TABLE, "", lambda device: device.type == "cuda")
    monkeypatch.setattr(devices, "native_form", lambda engine: form)
    monkeypatch.setattr(devices, "native_or_portable", lambda form, *_: form.table)
    assert table_on(EngineConfig(prefill_activations="fp8"), GPU) is TORCH_TABLE
    with pytest.raises(UserError, match="prefill_activations: found 'fp8' with the CUDA ops"):
        table_on(EngineConfig(prefill_activations="fp8", ops="cuda"), GPU)


def test_native_kernels_have_to_run_on_every_gpu(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = NativeForm(TORCH_TABLE, "", lambda device: device.index == 0)
    monkeypatch.setattr(devices, "native_form", lambda engine: form)
    several = [*GPU, torch.device("cuda", 1)]
    with pytest.raises(UserError, match="found 'fp8' with the CUDA ops on cuda:1"):
        table_on(EngineConfig(prefill_activations="fp8", gpus=2), several)


def test_every_gpu_needs_kernels(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (9 - device.index, device.index)
    )
    found = r"EngineConfig.ops: found cuda:1 \(NVIDIA X\) of compute capability 8.1, expected one"
    with pytest.raises(UserError, match=found):
        table_on(EngineConfig(ops="cuda", gpus=2), [*GPU, torch.device("cuda", 1)])
