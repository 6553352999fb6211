"""Errors as every command prints them: one line each, those of a device included."""

import re
import sys

import torch

from dsv4.command.flags import flag_name

MAX_MESSAGE = 300
_CUDA_CORE_ERRORS = "cuda.core._utils.cuda_utils"
_OUT_OF_MEMORY = re.compile(r"out of memory|OUT_OF_MEMORY|can't allocate memory")
_CUDA_ERROR = re.compile(r"CUDA (driver )?error: ")
_CONFIG_FIELD = re.compile(r"EngineConfig\.(\w+)(?:='(\w+)')?")


def user_message(error: Exception) -> str:
    """A user's error as one line to print, with flags in place of ``EngineConfig`` fields and
    without the number of an operating system's error.
    """
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        named = error.filename is not None
        text = f"{error.filename}: {error.strerror}" if named else error.strerror
    return _CONFIG_FIELD.sub(_flag, " ".join(text.split()))


def device_error_types() -> tuple[type[Exception], ...]:
    """The types that errors of a device have, and others too: ``device_message`` tells them apart.

    RuntimeError includes those of torch; cuda.core has no public name for its own, and need not be
    installed.
    """
    cuda_core = sys.modules.get(_CUDA_CORE_ERRORS)
    return (RuntimeError, MemoryError, *(() if cuda_core is None else (cuda_core.CUDAError,)))


def ran_out_of_memory(error: Exception) -> bool:
    """Whether the error says that a device, or the process, has no more memory."""
    gone = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return gone or _OUT_OF_MEMORY.search(str(error)) is not None


def named_gpu(message: str) -> int | None:
    """The index of the GPU whose memory ran out, where torch names it."""
    named = re.search(r"GPU (\d+)", message)
    return None if named is None else int(named[1])


def device_message(error: Exception) -> str | None:
    """What a device reports as one line, None for an error that is none of a device.

    The error is kept alive: after it torch aborts the process when it frees what the device holds.
    """
    if ran_out_of_memory(error):
        index = named_gpu(str(error))
        return f"memory: {'' if index is None else f'cuda:{index} '}ran out of memory"
    # Torch has a class for most errors of the device, but raises a plain one for some.
    plain = isinstance(error, RuntimeError) and not isinstance(error, torch.AcceleratorError)
    if plain and _CUDA_ERROR.match(str(error)) is None:
        return None
    sys.last_value = error
    return f"CUDA: {_one_line(_first(error))}"


def _flag(field: re.Match[str]) -> str:
    """``EngineConfig.cuda_graph='split'`` becomes ``--cuda-graph split``."""
    name, value = field.groups()
    return flag_name(name) if value is None else f"{flag_name(name)} {value}"


def _first(error: BaseException) -> BaseException:
    """What a device said first: every call behind that fails as well, those that clean up too."""
    while isinstance(error, torch.AcceleratorError) and isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


def _one_line(error: BaseException) -> str:
    """What happened, without the prefix that goes without saying and the advice: torch gives it in
    further lines, cuda.core in further sentences.
    """
    message = _CUDA_ERROR.sub("", str(error), count=1)
    first = message.split("\n")[0] if isinstance(error, RuntimeError) else message.split(". ")[0]
    text = " ".join(first.split())
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."
