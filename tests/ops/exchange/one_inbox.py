"""Ranks on the CPU whose kernels reach one inbox, for the machine that executes them."""

from dataclasses import replace

import torch

from dsv4.parallel.rank_state import connect
from dsv4.peers import InboxLayout, Peers
from tests.ptx.nvrtc import SourceEdit

CPU = torch.device("cpu")
SOON = SourceEdit("words.cuh", "WAIT_CYCLES = 10000000000ll", "WAIT_CYCLES = 100")
"""Kernels soon give up looking for words, by the machine's clock, which counts instructions."""


def ranks_of_one_inbox(layout: InboxLayout, tokens: int, step: int) -> list[Peers]:
    """Ranks in this step that all push into the same inbox, which each of them polls. Addresses,
    inbox and counters are one piece of memory, that of ``table_P``.
    """
    made = connect(layout, [CPU] * layout.ranks, tokens)
    # Words are read 16 bytes at a time.
    table = made[0].table_P.numel() + made[0].table_P.numel() % 2
    memory = torch.zeros(table + layout.words + 4, dtype=torch.int64)
    inbox = memory[table : table + layout.words]
    step_4, fault_4 = memory[-4:].view(torch.int32).split(4)
    step_4[0] = step
    table_P = memory[: made[0].table_P.numel()]
    addresses = [inbox.data_ptr()] * (layout.ranks + 1)
    addresses += [step_4.data_ptr(), fault_4.data_ptr()]
    table_P[: layout.ranks + 3] = torch.tensor(addresses)
    return [
        replace(one, table_P=table_P, inbox=inbox, step_4=step_4, fault_4=fault_4) for one in made
    ]
