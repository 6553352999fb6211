"""How far the ranks of a token are apart at every exchange, and how long they wait for each other:
decode steps whose kernels note the time (``dsv4.parallel.stamps``).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dsv4.decode import CUDAGraphDecoder
from dsv4.engine import Engine
from dsv4.errors import UserError
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.parallel.stamps import FOUND, PUSHED, STEPS, Offset, moments, offset, stamped
from dsv4.peers import LOGITS_EXCHANGE
from dsv4.sampling import Sampler, SamplingParams
from dsv4.step.steps import RecordedSteps

# Tokens in front of those that count: the first ones wait for what the host still does.
_WARM_UP = 8
_TOKENS = STEPS - _WARM_UP


def bench_skew(engine: Engine, position: int) -> dict[str, Any]:
    """Of greedy tokens behind ``position`` by full graphs: median and 95th percentile, in µs, of
    the time between the last words that two ranks push, and of the time from a rank's own last word
    to the last one that it finds; by kind of exchange and by exchange.

    The clocks are compared before and after. The engine's sequence is lost. Raises ``UserError``
    for an engine without ranks on two GPUs of their own.
    """
    steps = engine.steps
    devices = engine.state.all_devices
    if not isinstance(steps, RecordedSteps) or len(engine.state.ranks) != 2 or len(devices) != 2:
        raise UserError("--skew: expected a rank of CUDA ops on each of two GPUs")
    with _stamped_state(engine):
        timed = RecordedSteps(engine.models, engine.state, steps.table, MAX_DECODE_TOKENS)
        decoder = CUDAGraphDecoder(timed, "full", engine.max_context)
        before = offset(devices)
        for rank in engine.state.ranks:
            assert rank.peers is not None
            assert rank.peers.stamps_X2 is not None
            rank.peers.stamps_X2.zero_()
        engine.state.set_position(position)
        begun = timed.state.peers
        assert begun is not None
        first = int(begun.step_4[0])
        for _ in decoder.generate(0, Sampler(SamplingParams(temperature=0)), STEPS):
            pass
        after = offset(devices)
        ranks = [moments(rank.peers) for rank in engine.state.ranks if rank.peers is not None]
    order = [(first + 1 + token) % STEPS for token in range(STEPS)]
    return summary(torch.stack(ranks)[:, order[_WARM_UP:]], before, after)


def summary(times_RTX2: Tensor, before: Offset, after: Offset) -> dict[str, Any]:
    """The record of stamps int64 ``[2, tokens, 256, 2]``, in nanoseconds by each rank's clock.
    The offset of the clocks goes from that before to that after in a straight line.

    Exchanges that nobody took part in are left out. Raises ``UserError`` where a rank lacks a
    stamp.
    """
    pushed = times_RTX2[..., PUSHED]
    used = (pushed > 0).any(0).any(0).nonzero().flatten().tolist()
    stamps = times_RTX2[:, :, used]
    if bool((stamps == 0).any()):
        raise UserError("--skew: found exchanges without a stamp, expected all of them")
    # Behind the first one: floating point has too few bits for the nanoseconds of a clock.
    times = (stamps - stamps[0].min()).double()
    share = (times[1] - before.clock) / max(float(times[0].max()), 1.0)
    times[1] -= before.clock + share * (after.clock - before.clock)
    skew_TX = (times[1, ..., PUSHED] - times[0, ..., PUSHED]) / 1e3
    wait_RTX = (times[..., FOUND] - times[..., PUSHED]) / 1e3
    kinds = {
        "attention": [at for at, number in enumerate(used) if number % 2 == 0],
        "experts": [at for at, number in enumerate(used) if number % 2 and not _is_logits(number)],
        "logits": [at for at, number in enumerate(used) if _is_logits(number)],
    }
    chosen = {kind: torch.tensor(found) for kind, found in kinds.items() if found}
    return {
        "tokens": times.shape[1],
        "hop_us": round((before.hop + after.hop) / 2e3, 3),
        "clocks_moved_us": round((after.clock - before.clock) / 1e3, 3),
        "by_kind": {
            kind: {
                "skew_us": spread(skew_TX[:, at].abs()),
                "rank_1_later_us": spread(skew_TX[:, at]),
                "from_own_word_to_all_us": [spread(wait_TX[:, at]) for wait_TX in wait_RTX],
            }
            for kind, at in chosen.items()
        },
        "skew_us_by_exchange": [spread(skew_TX[:, at].abs()) for at in range(len(used))],
    }


def spread(values: Tensor) -> dict[str, float]:
    """Median and 95th percentile."""
    quantiles = torch.quantile(values.flatten(), torch.tensor([0.5, 0.95], dtype=values.dtype))
    return dict(zip(("median", "p95"), (round(float(q), 3) for q in quantiles), strict=True))


def table(record: Mapping[str, Any]) -> str:
    """The summary by kind of exchange, for reading."""
    lines = [
        f"{'exchange':<10} {'skew µs':>16} {'own word to all, rank 0':>25} {'rank 1':>16}",
    ]
    for kind, found in record["by_kind"].items():
        cells = [found["skew_us"], *found["from_own_word_to_all_us"]]
        first, *others = (f"{one['median']:.2f} ({one['p95']:.2f})" for one in cells)
        lines.append(f"{kind:<10} {first:>16} {others[0]:>25} {others[1]:>16}")
    lines.append(
        f"median (95 %) of {record['tokens']} tokens; a word takes {record['hop_us']} µs from GPU "
        f"to GPU, the clocks moved by {record['clocks_moved_us']} µs"
    )
    return "\n".join(lines)


def _is_logits(number: int) -> bool:
    return number == LOGITS_EXCHANGE


@contextmanager
def _stamped_state(engine: Engine) -> Iterator[None]:
    """Inside, steps that are recorded note the time."""
    kept = [rank.peers for rank in engine.state.ranks]
    try:
        for rank in engine.state.ranks:
            assert rank.peers is not None
            rank.peers = stamped(rank.peers)
        yield
    finally:
        for rank, peers in zip(engine.state.ranks, kept, strict=True):
            rank.peers = peers
