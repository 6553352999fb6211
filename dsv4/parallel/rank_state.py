"""The decode state of every rank, and the memory in which the ranks exchange partial results."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.caches.allocation import step_tokens
from dsv4.caches.state import DecodeState
from dsv4.channels import Channels
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.launch.constants import TOKEN_TILE
from dsv4.parallel.peer_memory import allow_peer_access, reach_each_other, shared_memory
from dsv4.parallel.placement import Placement
from dsv4.parallel.received_bytes import channel_words
from dsv4.peers import FAULT_WORDS, SLOTS, STEP_WORDS, WORD_BYTES, InboxLayout, Peers
from dsv4.turns import Turns


def allocate_state(
    config: ModelConfig,
    engine: EngineConfig,
    max_context: int,
    placement: Placement,
    planned: bool = False,
) -> DecodeState:
    """The state of rank 0, which knows those of the other ranks; ``planned``: without memory.

    Raises ``UserError`` for GPUs that cannot write into each other's memory.
    """
    states = [
        DecodeState.allocate(
            config, engine, max_context, placement.of_rank(rank).layer_devices, planned
        )
        for rank in range(placement.ranks)
    ]
    if len(placement.devices) == placement.ranks == 1:
        return states[0]
    turns = Turns(() if planned else placement.devices)
    if placement.ranks == 1:
        channels = _channels(config, engine, placement, turns, planned)
        return replace(states[0], channels=channels, turns=turns)
    layout = InboxLayout.of(config, placement.cuts)
    tokens = step_tokens(engine)
    if planned:
        peers = [Peers.planned(rank, layout, tokens) for rank in range(placement.ranks)]
    else:
        peers = connect(layout, [state.devices[-1] for state in states], tokens)
    return replace(states[0].joined(states[1:], peers), turns=turns)


def _channels(
    config: ModelConfig, engine: EngineConfig, placement: Placement, turns: Turns, planned: bool
) -> Channels | None:
    on_gpus = all(device.type == "cuda" for device in placement.devices)
    if not (planned or (on_gpus and reach_each_other(placement.devices))):
        return None
    home = torch.device("meta") if planned else None
    words = {
        (source, target): shared_memory((words,), torch.int64, home or target)
        for (source, target), words in channel_words(config, engine, placement).items()
    }
    return Channels(words, turns)


def connect(layout: InboxLayout, devices: Sequence[torch.device], tokens: int) -> list[Peers]:
    """Every rank's view of the others; rank r is on ``devices[r]``, and several may be on one.
    ``tokens`` of the longest step. With fewer than ``layout.ranks`` devices, two or four, the rest
    is absent: for each of them a rank writes its words, and its rows as those of their tokens, into
    the memory of one other rank, so that all of them get what an absent one would send.
    """
    on_gpus = devices[0].type == "cuda"
    if on_gpus:
        allow_peer_access(tuple(dict.fromkeys(devices)))
    inboxes = [shared_memory((layout.words,), torch.int64, device) for device in devices]
    terms = (SLOTS, tokens, layout.width)
    partials = [shared_memory(terms, torch.float32, device) for device in devices]
    has_absent = len(devices) < layout.ranks
    # The last tiles of absent ranks may lie behind the tokens.
    room = tokens + (layout.ranks * TOKEN_TILE if has_absent else 0)
    inputs = [shared_memory((room, layout.width), torch.bfloat16, device) for device in devices]
    chosen = [shared_memory((room, layout.listed), torch.int64, device) for device in devices]
    inbox_bytes = WORD_BYTES * layout.rank_words
    fault_4 = torch.zeros(FAULT_WORDS, dtype=torch.int32, pin_memory=on_gpus)
    found = []
    for rank, device in enumerate(devices):
        step_4 = torch.zeros(STEP_WORDS, dtype=torch.int32, device=device)
        addresses = [
            *_addresses(inboxes, rank, layout.ranks, inbox_bytes),
            *(one.data_ptr() for one in (inboxes[rank], step_4, fault_4)),
            *_addresses(partials, rank, layout.ranks, 0),
            *_addresses(inputs, rank, layout.ranks, _tile_bytes(inputs[0])),
            *_addresses(chosen, rank, layout.ranks, _tile_bytes(chosen[0])),
        ]
        table_P = torch.tensor(addresses, dtype=torch.int64, device=device)
        rows = inputs[rank][:tokens], chosen[rank][:tokens]
        own = inboxes[rank], step_4, fault_4, partials[rank]
        found.append(Peers(rank, layout, table_P, *own, *rows))
    return found


def _tile_bytes(rows: Tensor) -> int:
    return TOKEN_TILE * rows.shape[1] * rows.itemsize


def _addresses(memories: Sequence[Tensor], rank: int, ranks: int, apart: int) -> list[int]:
    """Where ``rank`` reaches the memory of each of ``ranks``. In place of an absent rank's it is
    that of a present one, moved so that ``rank`` writes there what the absent one would: by
    ``apart`` bytes for every rank between the two.
    """
    present = len(memories)
    addresses = [memory.data_ptr() for memory in memories]
    for missing in range(present, ranks):
        stand_in = memories[(rank + 1 + missing % (present - 1)) % present]
        addresses.append(stand_in.data_ptr() + (missing - rank) * apart)
    return addresses
