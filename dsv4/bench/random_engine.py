"""An engine on random weights of a published geometry."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.bench.geometry_bytes import layer_bytes
from dsv4.checkpoint import Layout, synthetic_rank_weights, synthetic_weights
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.layers.weights import ReadOnce
from dsv4.ops.tables import Table
from dsv4.parallel.devices import engine_devices
from dsv4.parallel.placement import Placement
from dsv4.plan import available_bytes
from dsv4.weights.parameters import MtpKind
from dsv4.weights.quant import QuantTensor


def build_random(
    config: ModelConfig,
    engine_config: EngineConfig,
    layout: Layout,
    table: Table | None,
    ranks: int | None = None,
    mtp: MtpKind | None = None,
) -> Engine:
    """Weights are drawn on their devices. ``ranks``: that the layers are cut for, where two stand
    for more of them. ``mtp``: with a draft module. Raises ``UserError`` where there is no room.
    """
    sizes = layer_bytes(config, layout, mtp)
    placement = Placement.of(engine_config, engine_devices(engine_config), sizes)
    if ranks is not None:
        placement = replace(placement, absent_ranks=ranks - placement.ranks)
    refuse_if_too_large(placement, sizes)
    weights = _random_weights(config, layout, placement, mtp)
    engine = Engine(config, engine_config, weights, placement, table)
    synchronize(engine)
    return engine


def refuse_if_too_large(placement: Placement, sizes: Sequence[int]) -> None:
    """Raises ``UserError`` for a device that has no room for its weights alone. ``sizes``: bytes of
    whole layers, of which a rank has at least its share.
    """
    needed: Counter[torch.device] = Counter()
    for stage in placement.stages:
        share = sum(sizes[layer] for layer in stage.layers) // placement.cuts
        needed.update(dict.fromkeys(stage.devices, share))
    for device, nbytes in needed.items():
        available = available_bytes(device)
        if nbytes > available:
            raise UserError(
                f"memory: {device}: found {available >> 20:,} MiB available, expected at least "
                f"{nbytes >> 20:,} for its weights; use more GPUs or fewer --layers"
            )


def _random_weights(
    config: ModelConfig, layout: Layout, placement: Placement, mtp: MtpKind | None
) -> list[ReadOnce[QuantTensor | Tensor]]:
    """Those of every rank; of several each is drawn in the shapes of its parts."""
    if placement.ranks == 1:
        return [ReadOnce(synthetic_weights(config, layout, 0, placement.device_of, mtp))]
    return [
        ReadOnce(synthetic_rank_weights(config, layout, 0, device, placement.cuts, rank, mtp))
        for rank, device in enumerate(placement.stages[0].devices)
    ]


def synchronize(engine: Engine) -> None:
    """Waits for all devices of an engine."""
    for device in engine.state.all_devices:
        torch.cuda.synchronize(device)


def random_ids(engine: Engine, count: int, seed: int) -> list[int]:
    """Ids of the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(engine.config.vocab_size, (count,), generator=generator).tolist()
