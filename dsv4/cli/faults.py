"""What a device reports while the driver runs, and what it was to hold when its memory ran out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dsv4.command.errors import device_error_types, device_message, named_gpu, ran_out_of_memory
from dsv4.errors import UserError
from dsv4.plan import MemoryPlan


@contextmanager
def device_faults(plan: Callable[[], MemoryPlan]) -> Iterator[None]:
    """Raises what a device reports inside the block as ``UserError``: out of memory, and errors of
    CUDA or its kernels.

    Other errors are bugs and stay as they are. ``plan`` is asked for what the devices were to hold
    when memory ran out.
    """
    try:
        yield
    except device_error_types() as error:
        message = device_message(error)
        if message is None:
            raise
        if ran_out_of_memory(error):
            message = out_of_memory(str(error), plan)
        raise UserError(message) from None


def out_of_memory(message: str, plan: Callable[[], MemoryPlan]) -> str:
    """The device that ran out of memory, if torch's ``message`` names it, and its bytes in the
    plan, unless there is not even the memory to make one.
    """
    advice = "use more GPUs or a smaller --max-context or --prefill-chunk"
    try:
        devices = plan().devices
    except (MemoryError, RuntimeError):
        return f"memory: ran out of memory; {advice}"
    index = named_gpu(message)
    ran_out = [device for device in devices if device.device.index == index] or devices
    names = " or ".join(str(device.device) for device in ran_out)
    said = " and ".join(f"{device.total_bytes >> 20:,}" for device in ran_out)
    return f"memory: {names} ran out of memory, the plan said {said} MiB; {advice}"
