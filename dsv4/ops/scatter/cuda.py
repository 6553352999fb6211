"""``scatter`` on the GPU as one launch, whatever the number of parts: a table of them lies in the
memory that they come from.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dsv4.launch.compiler import is_installed
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.loading import driver, loaded
from dsv4.launch.prepared import LaunchForm, PreparedLaunch
from dsv4.launch.signature import signature
from dsv4.launch.target import Target, compile_target
from dsv4.ops.scatter import Part

# Of a part in the table: as many int64 words.
_WORDS = 5
PART_BYTES = 8 * _WORDS
_KERNEL = Kernel("scatter/scatter", "scatter")
# Few enough to leave room for what packs weights meanwhile, enough to outrun the link.
SHAPE = Shape(_KERNEL, 64, 256)


def table_words(parts: Iterable[Part]) -> list[int]:
    """The table of the parts, ``PART_BYTES`` each in int64 words, as ``scatter.cu`` reads it."""
    words: list[int] = []
    for start, stop, target, width, first, end in parts:
        if width:
            rows = (stop - start) // width
            words += (start + first, target.data_ptr(), end - first, rows, width)
        else:
            words += (start, target.data_ptr(), stop - start, 1, 0)
    return words


def kernel_target(device: torch.device) -> Target | None:
    """What the kernel is compiled for on a GPU of this machine, where that can be done; it is
    loaded then.
    """
    properties = torch.cuda.get_device_properties(device)
    architecture = compile_target(properties.major, properties.minor)
    if architecture is None or not is_installed():
        return None
    target = Target(device, architecture, properties.multi_processor_count)
    loaded(_KERNEL, target)
    return target


class Scatter:
    """Launches for one piece of ``memory``, uint8 ``[bytes]``, in which the tables lie too, on a
    stream of its device.
    """

    def __init__(self, target: Target, memory: Tensor, stream: torch.cuda.Stream) -> None:
        arguments = signature(_KERNEL.source, _KERNEL.function)
        self._form = LaunchForm(arguments, target, SHAPE)
        self._form.retarget(0, stream.cuda_stream)
        self._launch = PreparedLaunch(arguments, self._form)
        self._memory = memory.data_ptr()

    def queue(self, table: int, parts: int) -> None:
        """Queues the copies of the ``parts`` in the table at byte ``table``, a multiple of 8."""
        self._launch.take({"memory": self._memory, "table": self._memory + table, "parts": parts})
        form = self._form
        parameters = self._launch.parameters
        (error,) = driver().cuLaunchKernelEx(form.config, form.function, parameters, 0)
        if error:
            raise RuntimeError(f"CUDA driver error: {error.name} at a launch of {_KERNEL.function}")
