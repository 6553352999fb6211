"""One decode step as a list of graph replays, hand-offs between devices and, in split mode, eager attention."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from dsv4.hand_off import HandOff
from dsv4.layers.attention import Projections
from dsv4.layers.hyper_connection import Residual, Unmixed
from dsv4.model import Block, Segment, Transformer
from dsv4.state import DecodeState

Mode = Literal["split", "full"]
Result = TypeVar("Result")
Streams = dict[torch.device, torch.cuda.Stream]


def capture_graph(
    stream: torch.cuda.Stream, pool: tuple[int, int], body: Callable[[], Result]
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """``body`` captured on ``stream``, and what it returned: tensors that every replay overwrites.

    The result must be kept as long as the graph: its memory comes from ``pool``, which later captures share.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(stream.device), torch.cuda.stream(stream), _no_garbage_collection(), ExitStack() as stack:
        graph.capture_begin(pool, capture_error_mode="thread_local")  # pyright: ignore[reportArgumentType]

        def end(failed: type[BaseException] | None, *_: object) -> None:
            # What went wrong in the body is worth more than the fault of ending a capture that is lost.
            with suppress(RuntimeError) if failed else nullcontext():
                graph.capture_end()

        stack.push(end)
        result = body()
    return graph, result


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing the memory of an older graph in the middle of a capture would invalidate it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def full_region(segment: Segment) -> str:
    """Name of the one region of a segment in full mode."""
    return f"layers {segment.layers[0]} to {segment.layers[-1]}"


def split_regions(layer: int) -> tuple[str, str]:
    """Names of the two regions of a layer in split mode."""
    return f"layer {layer} graph A", f"layer {layer} graph B"


@dataclass
class CapturedStep:
    """A step of ``model`` on ``state`` that reads its token ids from ``tokens`` (int64 ``[T]`` on every device).

    ``regions`` names what was captured, in order. Every launch overwrites ``hidden_TE`` (the final hidden state),
    ``logits`` (float32 ``[T, V]``) and, with ``keep_streams``, ``block_streams`` (``[T, M, E]`` after every block).
    """

    model: Transformer
    state: DecodeState
    streams: Streams
    tokens: dict[torch.device, Tensor]
    mode: Mode
    keep_streams: bool
    pool: tuple[int, int] = field(default_factory=torch.cuda.graph_pool_handle)
    regions: list[str] = field(default_factory=list)
    block_streams: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._program: list[Callable[[], object]] = []
        self._kept: list[tuple[torch.cuda.CUDAGraph, object]] = []
        self._positions: dict[torch.device, Tensor] = {}
        self.hidden_TE, self.logits = self._capture()

    def launch(self) -> None:
        """Queues the step on the streams, which the caller has made the current ones."""
        for run in self._program:
            run()

    def _capture(self) -> tuple[Tensor, Tensor]:
        capture_segment = self._whole_segment if self.mode == "full" else self._layer_by_layer
        hand_offs: dict[tuple[torch.device, torch.device], HandOff] = {}
        first, *others = self.model.segments
        streams_TME = capture_segment(first, None)
        for segment in others:
            pair = streams_TME.device, segment.device
            if pair not in hand_offs:
                hand_offs[pair] = HandOff(*pair, tuple(streams_TME.shape), streams_TME.dtype, slots=1)
            self._program.append(partial(hand_offs[pair], streams_TME))
            arrived_TME = hand_offs[pair].slot(streams_TME.shape[0])
            streams_TME = capture_segment(segment, arrived_TME)
        return self._region("head", self.model.segments[-1].device, lambda: self._head(streams_TME))

    def _head(self, streams_TME: Tensor) -> tuple[Tensor, Tensor]:
        hidden_TE = self.model.head.hidden(streams_TME)
        return hidden_TE, self.model.head.logits(hidden_TE)

    def _whole_segment(self, segment: Segment, arrived_TME: Tensor | None) -> Tensor:
        def body() -> Tensor:
            streams_TME, on_block = self._begin(segment, arrived_TME), self.block_streams.append
            inputs = self.tokens[segment.device], self._positions[segment.device]
            return segment(streams_TME, *inputs, self.state, on_block if self.keep_streams else None)

        return self._region(full_region(segment), segment.device, body)

    def _layer_by_layer(self, segment: Segment, arrived_TME: Tensor | None) -> Tensor:
        carried: Tensor | Unmixed | None = arrived_TME
        for layer, block in zip(segment.layers, segment.blocks, strict=True):
            carried = self._layer(segment, layer, block, carried)
        block, unmixed = segment.blocks[-1], carried
        assert isinstance(unmixed, Unmixed)
        return self._region(f"layer {segment.layers[-1]} mix", segment.device, lambda: block.mix(unmixed))

    def _layer(self, segment: Segment, layer: int, block: Block, incoming: Tensor | Unmixed | None) -> Unmixed:
        device = segment.device

        def graph_a() -> tuple[Projections, Residual]:
            return block.open(incoming if isinstance(incoming, Unmixed) else self._begin(segment, incoming))

        def attention() -> None:
            with torch.cuda.device(device):
                y_TE.copy_(block.attn.attend(projections, self._positions[device], self.state.layers[layer]))

        def graph_b() -> Unmixed:
            unmixed = block.close(y_TE, residual, self.tokens[device])
            if self.keep_streams:
                self.block_streams.append(block.mix(unmixed))
            return unmixed

        region_a, region_b = split_regions(layer)
        projections, residual = self._region(region_a, device, graph_a)
        y_TE = torch.empty_like(residual.streams_TME[:, 0])
        self._program.append(attention)
        return self._region(region_b, device, graph_b)

    def _begin(self, segment: Segment, arrived_TME: Tensor | None) -> Tensor:
        device = segment.device
        return self.model.begin(device, arrived_TME, self.tokens[device], self._positions, self.state)

    def _region(self, name: str, device: torch.device, body: Callable[[], Result]) -> Result:
        """Captures ``body`` as a graph of its own, which ``launch`` replays in this place."""
        graph, result = capture_graph(self.streams[device], self.pool, body)
        self.regions.append(name)
        self._program.append(graph.replay)
        self._kept.append((graph, result))
        return result
