"""Parts of whole weights that are in memory; the loader cuts them as it reads."""

from collections.abc import Mapping

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.parallel.sharding import cut_of
from dsv4.weights.cut import Cut, part_cuts
from dsv4.weights.parameters import parameters, shown_mtp
from dsv4.weights.quant import QuantTensor


def rank_weights(
    weights: Mapping[str, QuantTensor | Tensor], config: ModelConfig, ranks: int, rank: int
) -> dict[str, QuantTensor | Tensor]:
    """The parts that a rank holds of whole ``weights`` by canonical name, on their devices. What is
    not cut is not copied.
    """
    mtp, stages = shown_mtp(weights) or (None, None)
    known = parameters(config, mtp, stages)
    return {
        name: cut_weight(weight, cut_of(known[name], ranks, rank))
        for name, weight in weights.items()
    }


def cut_weight(weight: QuantTensor | Tensor, cut: Cut | None) -> QuantTensor | Tensor:
    """A contiguous copy of a part of a stored weight ``[..., N, K]``, or of a plain parameter; None
    is the weight itself.

    Its values are, bit for bit, that part of the weight's values. Raises ``ValueError`` for what is
    no part of it and like ``part_cuts``.
    """
    if cut is None:
        return weight
    shape = cut.shape(tuple(weight.shape))
    if isinstance(weight, Tensor):
        return cut.narrow(weight)
    cuts = part_cuts(weight.format, cut)

    def part(name: str, tensor: Tensor | None) -> Tensor | None:
        of_part = cuts[name]
        return tensor if tensor is None or of_part is None else of_part.narrow(tensor)

    data = part("data", weight.data)
    assert data is not None
    block_scale = part("block_scale", weight.block_scale)
    return QuantTensor(data, block_scale, weight.global_scale, weight.format, shape)
