"""Tensor parallelism: which part of every parameter a rank holds.

Cut are the heads with their groups of wo_a and their columns of wo_b, the inner dimension of every
expert, the shared one too, and the rows of the head. Each product of a cut weight is then either a
part of the whole one's result (rows) or one term of a sum over the ranks (columns). Everything else
is whole on every rank, and so are the caches. The blocks of a draft module are cut as layers are.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

from dsv4.config import ModelConfig
from dsv4.engine_config import TENSOR_GPUS
from dsv4.errors import UserError
from dsv4.integers import ceil_div
from dsv4.peers import HEAD_ROWS, LOGITS_EXCHANGE
from dsv4.weights.cut import COLUMNS, ROWS, Cut, part_cuts
from dsv4.weights.parameters import MtpKind, Parameter, parameters
from dsv4.weights.quant import QuantFormat

RANKS = (1, *TENSOR_GPUS)
HEAD = "head.weight"
_BLOCK = re.compile(r"(?:layers|mtp)\.[0-9]+\.")
_BLOCK_CUTS = {
    "attn.attn_sink": COLUMNS,
    "attn.wq_b.weight": ROWS,
    "attn.wo_a.weight": ROWS,
    "attn.wo_b.weight": COLUMNS,
    **{
        f"ffn.{experts}.{matrix}.weight": dimension
        for experts in ("experts", "shared_experts")
        for matrix, dimension in (("w1", ROWS), ("w2", COLUMNS), ("w3", ROWS))
    },
}


def cut_of(parameter: Parameter, ranks: int, rank: int) -> Cut | None:
    """The part of a (whole) parameter that ``rank`` of ``ranks`` holds; None: all of it.

    Parts are equal, but for those of the head, which are the same number of ``HEAD_ROWS`` rows or
    one less. Expects what ``check_divisible`` has checked.
    """
    dimension = _cut_dimension(parameter.name)
    if dimension is None or ranks == 1:
        return None
    size = parameter.shape[dimension]
    if parameter.name == HEAD:
        units = ceil_div(size, HEAD_ROWS)
        first, stop = (ceil_div(at * units, ranks) * HEAD_ROWS for at in (rank, rank + 1))
        return Cut(dimension, first, min(stop, size))
    share = size // ranks
    return Cut(dimension, rank * share, (rank + 1) * share)


def local_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """The geometry of one rank: ``parameters`` of it have the shapes of the rank's parts.

    The exception is the head: its rows are those of its weight (``local_parameters``), while
    ``vocab_size`` is that of the embedding and of the logits, which are whole.
    """
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks,
        o_groups=config.o_groups // ranks,
        moe_intermediate_size=config.moe_intermediate_size // ranks,
    )


def local_parameters(
    config: ModelConfig, ranks: int, rank: int, mtp: MtpKind | None = None
) -> dict[str, Parameter]:
    """The parameters of a rank by name, with the shapes of its parts."""
    whole = parameters(config, mtp)
    return {name: local_parameter(parameter, ranks, rank) for name, parameter in whole.items()}


def local_parameter(parameter: Parameter, ranks: int, rank: int) -> Parameter:
    """A (whole) parameter with the shape of a rank's part."""
    cut = cut_of(parameter, ranks, rank)
    return parameter if cut is None else replace(parameter, shape=cut.shape(parameter.shape))


def check_divisible(
    config: ModelConfig, stored: Iterable[tuple[Parameter, QuantFormat | None]], ranks: int
) -> None:
    """Raises ``UserError`` with the numbers of GPUs that work, when the (whole) ``stored``
    parameters with their formats cannot be cut for ``ranks``.
    """
    stored = list(stored)
    obstacle = _obstacle(config, stored, ranks)
    if obstacle is None:
        return
    fitting = [str(count) for count in RANKS[1:] if is_divisible(config, stored, count)]
    expected = " or ".join(fitting) if fitting else "EngineConfig.parallel='pipeline'"
    raise UserError(
        f"EngineConfig.gpus: found {ranks} with EngineConfig.parallel='tensor', "
        f"expected {expected} ({obstacle})"
    )


def is_divisible(
    config: ModelConfig, stored: Iterable[tuple[Parameter, QuantFormat | None]], ranks: int
) -> bool:
    """Whether ``check_divisible`` raises nothing."""
    return _obstacle(config, stored, ranks) is None


def _cut_dimension(name: str) -> int | None:
    if name == HEAD:
        return ROWS
    block = _BLOCK.match(name)
    return None if block is None else _BLOCK_CUTS.get(name[block.end() :])


def _obstacle(
    config: ModelConfig, stored: Iterable[tuple[Parameter, QuantFormat | None]], ranks: int
) -> str | None:
    """Why a model cannot be cut for ``ranks``; None when it can."""
    if ranks not in RANKS:
        return f"{ranks} is not one of {', '.join(map(str, RANKS))}"
    # Heads go with their groups, and each group has as many.
    for name in ("o_groups", "moe_intermediate_size"):
        size: int = vars(config)[name]
        if size % ranks:
            return f"{name} is {size}"
    if ranks > 1 and 2 * config.num_hidden_layers > LOGITS_EXCHANGE:
        return f"num_hidden_layers is {config.num_hidden_layers}, above {LOGITS_EXCHANGE // 2}"
    if ceil_div(config.vocab_size, HEAD_ROWS) < ranks:
        return f"vocab_size is {config.vocab_size}"
    for parameter, format in stored:
        for rank in range(ranks):
            cut = cut_of(parameter, ranks, rank)
            if cut is None or format is None:
                break
            try:
                part_cuts(format, cut)
            except ValueError as error:
                return f"{parameter.name}: {error}"
    return None
