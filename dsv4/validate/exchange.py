"""Do GPUs exchange words without a fault? ``python -m dsv4.validate.exchange --help``

Every rank pushes words that all of them know, by the way of tensor parallelism's decode steps
(docs/tensor_parallel.md), and compares each sum, bit for bit, where it arrives. Meanwhile copies go
from every GPU to the next one and to the one before. Prints one line, writes JSON, and ends with
exit code 1 when a sum is wrong.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from dsv4.command.flags import OneLineParser, integer
from dsv4.command.output_file import check_output
from dsv4.command.program import command, run_program
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.integers import ceil_div
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.measure.record_file import write_record
from dsv4.parallel.devices import engine_devices
from dsv4.parallel.known_exchanges import KnownExchanges
from dsv4.step.captured import capture_graph

_COPY_BYTES = 64 << 20
# Steps of half a millisecond are queued so far ahead, and so many copies at once, that there is
# always one under way.
_AHEAD = 16
_COPIES = 8


class CopyTraffic:
    """Copies from every GPU to a neighbour, one behind the other as long as somebody asks."""

    def __init__(self, devices: Sequence[torch.device], distance: int) -> None:
        self._streams = [torch.cuda.Stream(device) for device in devices]
        self._done = torch.cuda.Event()
        self._from = [self._bytes(device) for device in devices]
        targets = [devices[(index + distance) % len(devices)] for index in range(len(devices))]
        self._to = [self._bytes(device) for device in targets]
        self.copies = 0

    def go_on(self) -> None:
        """Queues copies of every GPU if those before are done."""
        if self.copies and not self._done.query():
            return
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            for _ in range(_COPIES):
                for source, target in zip(self._from, self._to, strict=True):
                    target.copy_(source, non_blocking=True)
        self._done.record(self._streams[0])
        self.copies += _COPIES

    @staticmethod
    def _bytes(device: torch.device) -> torch.Tensor:
        return torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)


def exchange(
    devices: Sequence[torch.device], exchanges: int, width: int, tokens: int, copies: bool
) -> dict[str, Any]:
    """At least this many exchanges by replayed graphs: wrong sums by rank, the time of an exchange,
    and GB/s of the copies that leave each GPU in either direction.

    Raises ``UserError`` without peer access, ``RuntimeError`` where words do not come.
    """
    known = KnownExchanges(devices, width, tokens)
    known.run()
    known.wrong()
    streams = [torch.cuda.Stream(device) for device in devices]
    pools = [torch.cuda.graph_pool_handle() for _ in devices]
    graphs = [
        capture_graph(stream, pool, lambda rank=rank: known.run_rank(rank))
        for rank, (stream, pool) in enumerate(zip(streams, pools, strict=True))
    ]
    traffic = [CopyTraffic(devices, distance) for distance in (1, -1)] if copies else []
    done = [torch.cuda.Event() for _ in range(_AHEAD)]
    steps = ceil_div(exchanges, known.exchanges)
    started = time.perf_counter()
    for step in range(steps):
        done[step % _AHEAD].synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        done[step % _AHEAD].record(streams[0])
        for one in traffic:
            one.go_on()
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        wrong = known.wrong()
    seconds = time.perf_counter() - started
    rates = [_COPY_BYTES * one.copies / seconds / 1e9 for one in traffic]
    return {
        "gpus": len(devices),
        "exchanges": steps * known.exchanges,
        "tokens": tokens,
        "width": width,
        "wrong_sums": wrong,
        "us_per_exchange": round(1e6 * seconds / steps / known.exchanges, 3),
        "copies_gb_per_s": [round(rate, 1) for rate in rates],
        "seconds": round(seconds, 2),
    }


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``python -m dsv4.validate.exchange``."""
    parser = OneLineParser(prog="python -m dsv4.validate.exchange", description=__doc__)
    parser.add_argument("--gpus", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--exchanges", type=integer(1), default=1_000_000, help="at least")
    parser.add_argument("--width", type=integer(2), default=4096, help="columns of a sum, even")
    parser.add_argument("--tokens", type=integer(1, MAX_DECODE_TOKENS), default=1)
    parser.add_argument("--no-copies", action="store_true", help="nothing else between the GPUs")
    parser.add_argument("--json", type=Path, help="write the result and where it comes from")
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    """The command: 1 when a sum is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    options = build_parser().parse_args(arguments)
    if options.width % 2:
        raise UserError(f"--width: found {options.width}, expected an even number")
    if options.json is not None:
        check_output("--json", options.json)
    devices = engine_devices(EngineConfig(device="cuda", gpus=options.gpus, parallel="tensor"))
    sizes = options.exchanges, options.width, options.tokens
    found = exchange(devices, *sizes, not options.no_copies)
    print(
        f"{found['exchanges']} exchanges between {found['gpus']} GPUs, "
        f"{found['us_per_exchange']} µs each: wrong sums by rank {found['wrong_sums']}"
    )
    write_record(options.json, "dsv4.validate.exchange", arguments, {"result": found})
    return 1 if any(found["wrong_sums"]) else 0


if __name__ == "__main__":
    run_program(main)
