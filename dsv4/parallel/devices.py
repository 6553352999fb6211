"""The devices of a run configuration, and the op table that runs on them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from dsv4.caches.allocation import DEFAULT_PREFILL_CHUNK
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.launch.target import ARCHITECTURES, compile_target
from dsv4.native.form import NativeForm, native_or_portable
from dsv4.native.forms import NATIVE_FORMS
from dsv4.ops.tables import Table, TableName, op_table, torch_table

# Tokens per forward, measured (docs/log.md): on one GPU longer chunks give every product more rows;
# several GPUs share a prompt, which must have a chunk for each of them to work on. With parts of
# every layer they share each chunk, and meet twice a layer.
ONE_GPU_PREFILL_CHUNK = 4096
SEVERAL_GPUS_PREFILL_CHUNK = 2048
TENSOR_PREFILL_CHUNK = 8192


def with_device_defaults(engine: EngineConfig, devices: Sequence[torch.device]) -> EngineConfig:
    """``engine`` with what it leaves to the devices: the chunk of a prompt."""
    if engine.prefill_chunk is not None:
        return engine
    if devices[0].type != "cuda":
        chunk = DEFAULT_PREFILL_CHUNK
    elif engine.parallel == "tensor":
        chunk = TENSOR_PREFILL_CHUNK
    else:
        alone = len(set(devices)) == 1
        chunk = ONE_GPU_PREFILL_CHUNK if alone else SEVERAL_GPUS_PREFILL_CHUNK
    return replace(engine, prefill_chunk=chunk)


def table_name(engine: EngineConfig, devices: Sequence[torch.device]) -> TableName:
    """The op table an ``EngineConfig`` asks for on ``devices``. Raises ``UserError`` for CUDA ops
    on a CPU.
    """
    on_cuda = devices[0].type == "cuda"
    if engine.ops == "cuda" and not on_cuda:
        raise UserError(
            f"EngineConfig.ops: found {engine.ops!r} on the CPU, expected 'torch' or a CUDA device"
        )
    if engine.ops == "auto":
        return "cuda" if on_cuda and engine.compute_dtype == "bfloat16" else "torch"
    return engine.ops


def table_on(engine: EngineConfig, devices: Sequence[torch.device]) -> Table:
    """The op table that ``engine`` asks for; with ``ops`` "auto" one with native kernels where
    they have passed their checks. Raises ``UserError`` for a GPU that its kernels are not compiled
    for, and where native kernels are required, also by ``prefill_activations``, and not to be had.
    """
    name = table_name(engine, devices)
    if name == "torch":
        table: Table = torch_table(engine.prefill_activations)
    else:
        table = op_table(name)
        check_architectures(devices)
        check_activations(engine, devices)
    if engine.ops != "auto":
        return table
    return native_or_portable(native_form(engine), table, devices, engine.require_native)


def native_form(engine: EngineConfig) -> NativeForm | None:
    """The native kernels for what ``engine`` computes, if there are any."""
    return NATIVE_FORMS.get(engine.prefill_activations)


def check_architectures(devices: Sequence[torch.device]) -> None:
    """Raises ``UserError`` for a GPU that the CUDA kernels have no compile target for."""
    for device in dict.fromkeys(devices):
        major, minor = torch.cuda.get_device_capability(device)
        if compile_target(major, minor) is None:
            name = torch.cuda.get_device_name(device)
            found = f"{device} ({name}) of compute capability {major}.{minor}"
            expected = f"one that the kernels are compiled for ({', '.join(ARCHITECTURES)})"
            raise UserError(
                f"EngineConfig.ops: found {found}, expected {expected}; "
                "EngineConfig.ops='torch' runs on any GPU"
            )


def check_activations(engine: EngineConfig, devices: Sequence[torch.device]) -> None:
    """Raises ``UserError`` for quantised activations with the CUDA ops where no native kernels are
    made for them.
    """
    if engine.prefill_activations == "bf16":
        return
    form = native_form(engine) if engine.ops == "auto" else None
    for device in devices:
        if form is None or not form.runs_on(device):
            found = f"{engine.prefill_activations!r} with the CUDA ops on {device}"
            name = torch.cuda.get_device_name(device)
            raise UserError(
                f"EngineConfig.prefill_activations: found {found} ({name}), expected native "
                "kernels, which are made for Blackwell; EngineConfig.ops='torch' emulates them"
            )


def check_planned_activations(engine: EngineConfig, table: TableName) -> None:
    """Raises ``UserError`` for quantised activations in the plan of GPUs that need not be there:
    its steps are Hopper's, which has no native kernels.
    """
    if engine.prefill_activations != "bf16" and table != "torch":
        found = f"{engine.prefill_activations!r} in the plan of GPUs that need not be there"
        raise UserError(
            f"EngineConfig.prefill_activations: found {found}, whose steps are Hopper's, "
            "expected 'bf16'; EngineConfig.ops='torch' emulates the others"
        )


def check_cuda_graph(engine: EngineConfig, devices: Sequence[torch.device]) -> None:
    """Raises ``UserError`` when graphs are asked for where nothing can be captured."""
    if engine.cuda_graph is None:
        return
    if devices[0].type != "cuda":
        raise UserError(
            f"EngineConfig.cuda_graph={engine.cuda_graph!r}: found no CUDA device, expected one"
        )
    if table_name(engine, devices) == "torch":
        raise UserError(
            f"EngineConfig.cuda_graph={engine.cuda_graph!r}: found the torch ops, expected 'cuda'"
        )


def engine_devices(engine: EngineConfig, absent: bool = False) -> tuple[torch.device, ...]:
    """The devices an ``EngineConfig`` asks for. Raises ``UserError`` when this machine does not
    have them, and for GPUs that differ where each computes a part of every layer.

    ``absent``: the GPUs of a machine that need not be there.
    """
    if absent and engine.device == "cpu":
        raise UserError("EngineConfig.device: found 'cpu' in the plan of GPUs, expected 'cuda'")
    available = engine.gpus if absent else torch.cuda.device_count()
    if engine.device == "cpu" or (engine.device == "auto" and available == 0):
        if engine.gpus > 1:
            raise UserError(
                f"EngineConfig.gpus: found {engine.gpus}, expected 1 when running on the CPU"
            )
        return (torch.device("cpu"),)
    if available == 0:
        raise UserError("EngineConfig.device='cuda': found no CUDA device, expected one")
    if available < engine.gpus:
        expected = f"at most {available} (CUDA devices on this machine)"
        raise UserError(f"EngineConfig.gpus: found {engine.gpus}, expected {expected}")
    devices = tuple(torch.device("cuda", index) for index in range(engine.gpus))
    if engine.parallel == "tensor" and not absent:
        _check_equal(devices)
    return devices


def _check_equal(devices: Sequence[torch.device]) -> None:
    """Raises ``UserError`` for GPUs that would not compute the same bits from the same values:
    what every rank computes for itself has to be equal.
    """
    first, *others = (_kind_of_gpu(device) for device in devices)
    for device, kind in zip(devices[1:], others, strict=True):
        if kind != first:
            raise UserError(
                f"EngineConfig.parallel='tensor': found {device} ({kind}) beside {devices[0]} "
                f"({first}), expected GPUs of one kind"
            )


def _kind_of_gpu(device: torch.device) -> str:
    found = torch.cuda.get_device_properties(device)
    capability = f"compute capability {found.major}.{found.minor}"
    return f"{found.name}, {capability}, {found.multi_processor_count} multiprocessors"
