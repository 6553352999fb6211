"""Whether the GPUs of a run can exchange words: a child process sends known ones between them, once
for these very GPUs, before any weight is read.
"""

from collections.abc import Sequence
from functools import partial

import torch

from dsv4.errors import UserError
from dsv4.native.check import Check
from dsv4.native.verdict_file import verdict_of_gpus
from dsv4.parallel.known_exchanges import KnownExchanges
from dsv4.parallel.peer_memory import check_peer_access

# 1,024 exchanges of a real width take milliseconds. Behind faults of the mapping, such as writes
# that a virtual machine loses, the first one does not come.
_STEPS = 8
_WIDTH = 4096


def check_exchange(devices: Sequence[torch.device]) -> None:
    """Raises ``UserError`` where words between GPUs ``cuda:0`` to the last of ``devices`` do not
    come, or come wrong.
    """
    check_peer_access(devices)
    complaint = verdict_of_gpus(f"{__name__}:on_{len(devices)}_gpus", devices).complaint
    if complaint is not None:
        raise UserError(f"EngineConfig.parallel='tensor': {complaint}")


def wrong_sums(devices: Sequence[torch.device]) -> str | None:
    """Which rank finds wrong sums, in one line; None: no rank does. Raises ``RuntimeError`` where
    one has waited for another in vain.
    """
    known = KnownExchanges(devices, _WIDTH)
    for _ in range(_STEPS):
        known.run()
    for rank, wrong in enumerate(known.wrong()):
        if wrong:
            count = _STEPS * known.exchanges * _WIDTH
            return f"found {wrong} of {count} sums wrong on rank {rank}, expected none"
    return None


def _checks(gpus: int) -> list[Check]:
    devices = [torch.device("cuda", index) for index in range(gpus)]
    return [Check(f"{gpus} GPUs", "exchange", lambda _: wrong_sums(devices))]


# ``check_exchange`` names them, and a child process looks them up.
on_2_gpus = partial(_checks, 2)
on_4_gpus = partial(_checks, 4)
on_8_gpus = partial(_checks, 8)
