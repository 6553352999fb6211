"""Weight bytes of a geometry: of a parameter, of its layers, and of a decoded token."""

from collections import defaultdict
from collections.abc import Iterable

import torch

from dsv4.checkpoint import Layout
from dsv4.checkpoint.layouts import format_in
from dsv4.config import KIND_OF_RATIO, ModelConfig
from dsv4.ops.linear.gathered_rows import is_worth_sharing
from dsv4.parallel.placement import bytes_by_layer
from dsv4.parallel.sharding import local_parameters
from dsv4.weights.parameters import MtpKind, Parameter, Role, layer_of, parameters
from dsv4.weights.quant import packed_bytes

# As Attention.input_rows.
_INPUT_ROWS = (
    "attn.wq_a.weight",
    "attn.wkv.weight",
    "compressor.wkv.weight",
    "compressor.wgate.weight",
    "indexer.weights_proj.weight",
)


def token_bytes(
    config: ModelConfig, layout: Layout, ranks: int = 1, dense: bool = False
) -> dict[str, int]:
    """Weight bytes one decoded token has to read, by "embedding and head" and layer kind (summed
    over its layers); of several ranks those of each. ``dense``: in a dense step.
    """
    totals: defaultdict[str, int] = defaultdict(int)
    found = local_parameters(config, ranks, 0)
    sizes = read_bytes(found.values(), layout, ranks)
    for parameter in found.values():
        if parameter.name.startswith("embed.") or parameter.role is Role.TABLE:
            continue
        if dense and serves_choice(parameter):
            continue
        nbytes = sizes[parameter.name]
        if parameter.role is Role.EXPERT:
            nbytes = nbytes * config.num_experts_per_tok // config.n_routed_experts
        layer = layer_of(parameter.name)
        totals["head" if layer is None else KIND_OF_RATIO[config.compress_ratios[layer]]] += nbytes
    return dict(totals)


def read_bytes(found: Iterable[Parameter], layout: Layout, ranks: int) -> dict[str, int]:
    """Bytes of every parameter, by name, that each of ``ranks`` reads in a decode step: a share of
    attention's input rows, where they share them (docs/tensor_parallel.md#the-input-rows).
    """
    sizes = {parameter.name: stored_bytes(parameter, layout) for parameter in found}
    lists: defaultdict[str, list[str]] = defaultdict(list)
    for name in sizes:
        if name.endswith(_INPUT_ROWS):
            lists[name.partition("attn.")[0]].append(name)
    for names in lists.values():
        if is_worth_sharing(sum(sizes[name] for name in names), ranks):
            sizes |= {name: sizes[name] // ranks for name in names}
    return sizes


def serves_choice(parameter: Parameter) -> bool:
    """Whether a dense step does not read it: its indexer asks for nothing."""
    return parameter.name.endswith("indexer.wq_b.weight")


def layer_bytes(config: ModelConfig, layout: Layout, mtp: MtpKind | None = None) -> list[int]:
    """Bytes of every layer in ``layout``, with the embedding and the head where they live;
    ``mtp``: with a draft module.
    """
    every = parameters(config, mtp).items()
    sizes = ((name, stored_bytes(parameter, layout)) for name, parameter in every)
    return bytes_by_layer(sizes, config.num_hidden_layers)


def stored_bytes(parameter: Parameter, layout: Layout) -> int:
    """Bytes of a parameter in ``layout``; what has no format counts as float32."""
    format = format_in(layout, parameter)
    return (
        4 * torch.Size(parameter.shape).numel()
        if format is None
        else packed_bytes(format, parameter.shape)
    )
