"""Plain parameters of a checkpoint: vectors and tables, which no format packs."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dsv4.checkpoint.finite import is_finite
from dsv4.checkpoint.index import Checkpoint
from dsv4.checkpoint.matrices import Held
from dsv4.checkpoint.problems import Problems
from dsv4.checkpoint.stored_parameters import StoredParameter
from dsv4.weights.parameters import Role


def load_plain(
    checkpoint: Checkpoint,
    found: Sequence[StoredParameter],
    experts: int,
    held: Mapping[str, Sequence[Held]],
    count: Callable[[int], None],
) -> dict[str, list[Tensor]]:
    """What each rank holds of the plain parameters among ``found``, by name, as ``held`` says.
    ``count`` is told of their bytes. Raises one ``UserError`` with all wrong values: NaN, infinity
    and ids that are none of ``experts``.
    """
    problems = Problems()
    loaded = {}
    for stored in found:
        if stored.format is None:
            name = stored.parameter.name
            tensor = read_plain(checkpoint, stored, experts, problems)
            loaded[name] = [_part_on(tensor, one) for one in held[name]]
            count(stored.nbytes)
    problems.raise_if_any(str(checkpoint.folder))
    return loaded


def read_plain(
    checkpoint: Checkpoint, stored: StoredParameter, experts: int, problems: Problems
) -> Tensor:
    """A NORM, FLOAT or TABLE in the dtype it is loaded in, on the CPU, memory-mapped or not."""
    (name,) = stored.parts["data"].names
    tensor = checkpoint.read(name)
    if stored.parameter.role is Role.TABLE:
        tensor = tensor.to(torch.int64)
        if tensor.numel() and not (int(tensor.min()) >= 0 and int(tensor.max()) < experts):
            found = f"{int(tensor.min())} to {int(tensor.max())}"
            problems.add(
                "out of range", f"{name} (found expert ids {found}, expected 0 to {experts - 1})"
            )
        elif (token := _first_repeating(tensor)) is not None:
            problems.add(
                "out of range", f"{name} (found an expert twice for token {token}, expected once)"
            )
    elif not is_finite(tensor):
        problems.add("not finite", f"{name} (found NaN or infinity)")
    dtype = torch.float32 if stored.parameter.role is Role.FLOAT else tensor.dtype
    return tensor.to(dtype)


def _first_repeating(ids_VK: Tensor) -> int | None:
    """The first row that holds a number, of 32 bits, twice. Rows are sorted only where there is
    one, which takes longer than to compare every column with those behind it.
    """
    ids_KV = ids_VK.to(torch.int32).t().contiguous()
    if not any(bool((ids_KV[by:] == ids_KV[:-by]).any()) for by in range(1, len(ids_KV))):
        return None
    sorted_VK = ids_VK.sort(dim=-1).values
    return int((sorted_VK[:, 1:] == sorted_VK[:, :-1]).any(-1).nonzero()[0])


def _part_on(tensor: Tensor, held: Held) -> Tensor:
    """A copy of what is held of a plain parameter."""
    part = tensor if held.cut is None else held.cut.narrow(tensor)
    return part.to(held.device, copy=True)
