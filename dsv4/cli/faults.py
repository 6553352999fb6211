"""Errors as the command line prints them: one line each, those of a device included."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dsv4.errors import UserError
from dsv4.plan import MemoryPlan

MAX_MESSAGE = 300
_CUDA_CORE_ERRORS = "cuda.core._utils.cuda_utils"
_OUT_OF_MEMORY = re.compile(r"out of memory|OUT_OF_MEMORY|can't allocate memory")
_CUDA_ERROR = re.compile(r"CUDA (driver )?error: ")
_CONFIG_FIELD = re.compile(r"EngineConfig\.(\w+)(?:='(\w+)')?")


def user_message(error: Exception) -> str:
    """A user's error as one line to print, with flags in place of ``EngineConfig`` fields."""
    return _CONFIG_FIELD.sub(_flag, " ".join(str(error).split()))


def _flag(field: re.Match[str]) -> str:
    """``EngineConfig.cuda_graph='split'`` becomes ``--cuda-graph split``."""
    name, value = field.groups()
    flag = "--" + name.replace("_", "-")
    return flag if value is None else f"{flag} {value}"


@contextmanager
def device_faults(plan: Callable[[], MemoryPlan]) -> Iterator[None]:
    """Raises what a device reports inside the block as ``UserError``: out of memory, and errors of
    CUDA or its kernels.

    Other errors are bugs and stay as they are. ``plan`` is asked for what the devices were to hold
    when memory ran out.
    """
    try:
        yield
    except _error_types() as error:
        message = str(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(
            message
        ):
            raise UserError(out_of_memory(message, plan())) from None
        # Torch has a class for most errors of the device, but raises a plain one for some.
        plain = isinstance(error, RuntimeError) and not isinstance(error, torch.AcceleratorError)
        if plain and _CUDA_ERROR.match(message) is None:
            raise
        # After such an error torch aborts the process when it frees what the device holds, so the
        # error keeps it alive.
        sys.last_value = error
        raise UserError(f"CUDA: {_one_line(error)}") from None


def out_of_memory(message: str, plan: MemoryPlan) -> str:
    """The device that ran out of memory, if torch's ``message`` names it, and its bytes in the
    plan.
    """
    named = re.search(r"GPU (\d+)", message)
    matching = [
        device
        for device in plan.devices
        if named is not None and device.device.index == int(named[1])
    ]
    ran_out = matching or plan.devices
    names = " or ".join(str(device.device) for device in ran_out)
    said = " and ".join(f"{device.total_bytes >> 20:,}" for device in ran_out)
    advice = "use more GPUs or a smaller --max-context or --prefill-chunk"
    return f"memory: {names} ran out of memory, the plan said {said} MiB; {advice}"


def _error_types() -> tuple[type[Exception], ...]:
    """RuntimeError includes those of torch; cuda.core has no public name for its own, and need not
    be installed.
    """
    cuda_core = sys.modules.get(_CUDA_CORE_ERRORS)
    return (RuntimeError, MemoryError, *(() if cuda_core is None else (cuda_core.CUDAError,)))


def _one_line(error: Exception) -> str:
    """What happened, without the prefix that goes without saying and the advice: torch gives it in
    further lines, cuda.core in further sentences.
    """
    message = _CUDA_ERROR.sub("", str(error), count=1)
    first = message.split("\n")[0] if isinstance(error, RuntimeError) else message.split(". ")[0]
    text = " ".join(first.split())
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."
