"""What a device reports ends the run with one line, wherever it happens; Ctrl-C ends it with what
there is.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import single_shot_inference
from dsv4 import Engine
from dsv4.cli.faults import device_faults, out_of_memory
from dsv4.command.errors import user_message
from dsv4.errors import UserError
from dsv4.plan import DevicePlan, MemoryPlan
from dsv4.step.direct import DirectSteps
from tests.driver.conftest import Result

Drive = Callable[..., Result]

ILLEGAL_ADDRESS = torch.AcceleratorError(
    "CUDA error: an illegal memory access was encountered\n"
    "Search for `cudaErrorIllegalAddress' in the documentation\n"
)
OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 GiB. "
    "GPU 1 has a total capacity of 79.11 GiB of which 1 GiB is free."
)


class CUDAError(Exception):
    """In place of cuda.core's, which is found by its module."""


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the errors keep alive is let go after every test."""
    monkeypatch.setattr(sys, "last_value", None, raising=False)


@pytest.fixture
def cuda_core(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        pass

    Module.CUDAError = CUDAError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.core._utils.cuda_utils", Module)  # type: ignore[arg-type]


def plan() -> MemoryPlan:
    devices = [
        DevicePlan(torch.device("cuda", i), 4, (i + 1) << 30, 0, 1 << 20, 1 << 20, 1 << 40)
        for i in range(2)
    ]
    return MemoryPlan(tuple(devices), 8192)


def line_for(error: Exception) -> str:
    with pytest.raises(UserError) as caught, device_faults(plan):
        raise error
    return str(caught.value)


def raise_after(
    calls: int, error: BaseException, original: Callable[..., Any]
) -> Callable[..., Any]:
    """``original`` that fails when it is called for the time after ``calls``."""
    done = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        if done > calls:
            raise error
        return original(*args, **kwargs)

    return wrapped


def test_out_of_memory_names_the_device_and_what_was_planned() -> None:
    expected = (
        "memory: cuda:1 ran out of memory, the plan said 2,050 MiB; "
        "use more GPUs or a smaller --max-context"
    )
    assert line_for(OUT_OF_MEMORY).startswith(expected)
    both = "memory: cuda:0 or cuda:1 ran out of memory, the plan said 1,026 and 2,050 MiB; "
    for error in (
        MemoryError(),
        torch.AcceleratorError("CUDA error: out of memory"),
        OUT_OF_MEMORY.__class__("?"),
    ):
        assert line_for(error).startswith(both)
    message = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. "
        "DefaultCPUAllocator: can't allocate memory: you tried"
    )
    assert line_for(RuntimeError(message)).startswith(both)
    assert "--prefill-chunk" in out_of_memory("", plan)


def test_memory_that_does_not_suffice_for_a_plan_is_one_line_too() -> None:
    def fail() -> MemoryPlan:
        raise MemoryError

    expected = "^memory: ran out of memory; use more GPUs"
    with pytest.raises(UserError, match=expected), device_faults(fail):
        raise OUT_OF_MEMORY


def test_errors_of_cuda_are_their_first_line(cuda_core: None) -> None:
    assert line_for(ILLEGAL_ADDRESS) == "CUDA: an illegal memory access was encountered"
    assert (
        line_for(RuntimeError("CUDA error: CUBLAS_STATUS_X when calling y"))
        == "CUDA: CUBLAS_STATUS_X when calling y"
    )
    assert line_for(RuntimeError("CUDA driver error: invalid argument")) == "CUDA: invalid argument"
    launch = CUDAError(
        "CUDA_ERROR_LAUNCH_FAILED: An exception occurred\n"
        " while executing a kernel. Common causes are"
    )
    assert (
        line_for(launch)
        == "CUDA: CUDA_ERROR_LAUNCH_FAILED: An exception occurred while executing a kernel"
    )
    assert sys.last_value is not None
    assert len(line_for(CUDAError("x" * 10_000))) < 320
    assert "ran out of memory" in line_for(
        CUDAError("CUDA_ERROR_OUT_OF_MEMORY: The API call failed")
    )


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("x"), UserError("y"), BrokenPipeError()]
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, device_faults(plan):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("EngineConfig.max_context: found 3", "--max-context: found 3"),
        ("EngineConfig.gpus or EngineConfig.prefill_chunk", "--gpus or --prefill-chunk"),
        (
            "EngineConfig.cuda_graph='split': found no\n  device",
            "--cuda-graph split: found no device",
        ),
        ("expected x; EngineConfig.ops='torch' runs", "expected x; --ops torch runs"),
        ("/EngineConfig/gpus: config.json", "/EngineConfig/gpus: config.json"),
    ],
)
def test_fields_of_the_configuration_are_flags_on_the_command_line(
    message: str, expected: str
) -> None:
    assert user_message(UserError(message)) == expected


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (ILLEGAL_ADDRESS, ["CUDA: an illegal memory access"]),
        (OUT_OF_MEMORY, ["memory: ", "MiB; use more GPUs"]),
    ],
)
def test_failing_load_is_one_line(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, error: Exception, parts: list[str]
) -> None:
    monkeypatch.setattr("dsv4.opened_checkpoint.loading_ranks", raise_after(0, error, len))
    drive("--device", "cpu").assert_user_error(*parts)


@pytest.mark.parametrize("method", ["run", "decode"])
@pytest.mark.parametrize(
    "error", [ILLEGAL_ADDRESS, OUT_OF_MEMORY, RuntimeError("CUDA error: x")], ids=type
)
def test_failing_step_is_one_line_after_the_text(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    done = 2 if method == "decode" else 0
    monkeypatch.setattr(DirectSteps, method, raise_after(done, error, getattr(DirectSteps, method)))
    result = drive("--device", "cpu", "--max-tokens", 9, "--ignore-eos", "--seed", 1, "--raw")
    assert result.code == 2
    assert (
        result.out == "" if method == "run" else len(result.out) > 1 and result.out.endswith("\n")
    )
    assert result.err.startswith(("error: CUDA: ", "error: memory: "))
    assert result.err.count("\n") == 1


def test_compiling_is_shown_as_compiling(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, compiling: Callable[[int, int], None], **__: object) -> None:
        compiling(1, 4)
        raise UserError("stop here")

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    result = drive()
    assert "compile ━━━━━───────────────  25 %  1 of 4 kernels" in result.err
    assert result.err.endswith("\x1b[Kerror: stop here\n")
    assert "compile" not in drive("--quiet").err


@pytest.mark.parametrize("where", ["load", "run", "decode"])
def test_ctrl_c_reports_what_there_is(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "load":
        monkeypatch.setattr(
            "dsv4.opened_checkpoint.loading_ranks", raise_after(0, KeyboardInterrupt(), len)
        )
    else:
        done = 2 if where == "decode" else 0
        original = getattr(DirectSteps, where)
        monkeypatch.setattr(DirectSteps, where, raise_after(done, KeyboardInterrupt(), original))
    result = drive("--device", "cpu", "--max-tokens", 9, "--ignore-eos", "--seed", 1, "--raw")
    assert result.code == 130
    assert result.err.rstrip("\n").endswith("interrupted")
    assert result.err.count("\n") == 1
    assert (len(result.out) > 1) == (where == "decode")


def test_plan_of_several_gpus_is_shown_before_loading(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, checkpoint: Any
) -> None:
    planned = plan()
    monkeypatch.setattr(Engine, "plan", lambda *_: planned)
    monkeypatch.setattr(Engine, "load", raise_after(0, UserError("stop here"), len))
    result = drive("--gpus", 2)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"{planned}\nerror: stop here\n"
    assert drive("--gpus", 2, "--quiet").err == drive().err == "error: stop here\n"


def test_driver_passes_the_plan_of_its_own_configuration(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        single_shot_inference.Engine, "plan", lambda *arguments: seen.append(arguments) or plan()
    )
    monkeypatch.setattr("dsv4.opened_checkpoint.loading_ranks", raise_after(0, OUT_OF_MEMORY, len))
    drive("--device", "cpu", "--max-context", 77).assert_user_error("cuda:1 ran out", "2,050 MiB")
    assert [arguments[1].max_context for arguments in seen] == [77]


@pytest.mark.parametrize(
    ("ops", "capability", "refused"),
    [
        ("auto", (8, 0), True),
        ("cuda", (12, 0), True),
        ("torch", (8, 0), False),
        ("auto", (9, 0), False),
        ("cuda", (10, 3), False),
    ],
)
def test_gpu_without_kernels_is_one_line_before_any_weight_is_read(
    drive: Drive,
    monkeypatch: pytest.MonkeyPatch,
    ops: str,
    capability: tuple[int, int],
    refused: bool,
) -> None:
    def load_weights(*_: object, **__: object) -> None:
        raise UserError("the weights are read")

    major, minor = capability
    properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=132)
    monkeypatch.setattr("dsv4.opened_checkpoint.loading_ranks", load_weights)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr("dsv4.launch.target.count_clusters", lambda *_: ())
    monkeypatch.setattr("dsv4.engine.compile_ahead", lambda *_: None)
    result = drive("--device", "cuda", "--ops", ops)
    if refused:
        device = f"cuda:0 (NVIDIA X) of compute capability {major}.{minor}"
        found = f"error: --ops: found {device}, expected"
        result.assert_user_error(found, "sm_90a, sm_100a, sm_103a", "--ops torch runs on any GPU")
    else:
        result.assert_user_error("error: the weights are read")
