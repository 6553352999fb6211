"""NaN among values that are compared: a comparison hides it, so the op tells the host."""

from torch import Tensor


def note_nan(nan_1: Tensor | None, values: Tensor) -> None:
    """Sets int32 ``nan_1`` ``[1]`` on the host to 1 if any value is NaN; None: nobody wants to
    know.
    """
    if nan_1 is not None and bool(values.isnan().any()):
        nan_1.fill_(1)
