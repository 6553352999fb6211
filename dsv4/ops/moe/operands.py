"""What both forms of the experts share: the checks of their weights and their kernel arguments."""

from typing import NamedTuple

from torch import Tensor

from dsv4.ops.linear.prefill import matrix_arguments
from dsv4.ops.moe import ExpertWeights
from dsv4.ops.router import Router
from dsv4.weights.packed import PackedWeight


class Layer(NamedTuple):
    """The experts of a layer and their clamp: what does not change between its steps."""

    experts: ExpertWeights[PackedWeight]
    shared: ExpertWeights[PackedWeight]
    limit: float


def check_experts(x_TE: Tensor, router: Router[PackedWeight], layer: Layer) -> None:
    """Raises ``ValueError`` for weights that are not packed or do not fit x and the gate."""
    width = x_TE.shape[1]
    count, inner = layer.experts.w1.shape[:2]
    if count != router.gate.shape[0]:
        expected = f"{router.gate.shape[0]}, the rows of the gate"
        raise ValueError(f"experts: found {count}, expected {expected}")
    shapes = {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}
    for name, group, stack in (("experts", layer.experts, (count,)), ("shared", layer.shared, ())):
        for part, shape in shapes.items():
            weight = getattr(group, part)
            if not isinstance(weight, PackedWeight) or weight.format != group.w1.format:
                found = weight.format.value
                expected = f"a packed {group.w1.format.value}"
                raise ValueError(f"{name}.{part}: found {found}, expected {expected}")
            if tuple(weight.shape) != (*stack, *shape):
                expected = [*stack, *shape]
                raise ValueError(f"{name}.{part}: found {list(weight.shape)}, expected {expected}")


def expert_arguments(layer: Layer) -> dict[str, Tensor | None]:
    """Kernel arguments by name: those of the checkpoint, w1_data to shared_w2_global_scale."""
    arguments = {}
    for prefix, group in (("", layer.experts), ("shared_", layer.shared)):
        for name in ("w1", "w3", "w2"):
            arguments |= matrix_arguments(getattr(group, name), prefix + name)
    return arguments
