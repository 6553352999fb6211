"""Which decoder is chosen, where graphs are refused before a weight is read, and the op tables of a
GPU.
"""

import importlib.util
import logging
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, UserError
from dsv4.decode import Mode, choose
from dsv4.ops.tables import CUDA_TABLE, CUTEDSL_TABLE, op_table
from dsv4.parallel.devices import check_cuda_graph, table_name
from tests.model.tiny import small_config, tiny_engine

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class EagerDecoder:
    """Stands for ``CUDAGraphDecoder`` without a GPU: eager steps into the same memory; where
    ``is_wrong`` one logit of the last step of a self-check is not the eager one.
    """

    def __init__(self, engine: Engine, mode: Mode, is_wrong: bool, log: list[str]) -> None:
        self.steps = engine.steps
        self.state = engine.state
        self.max_context = engine.max_context
        self.mode = mode
        self.is_wrong = is_wrong
        self.log = log
        self.seen: list[tuple[int, int]] = []
        self._logits_TV = torch.empty(1, engine.config.vocab_size)
        log.append(f"capture {mode}")

    def replay(self, token: int, position: int) -> Tensor:
        self.log.append(self.mode)
        assert position == self.state.position < self.max_context
        self.seen.append((token, position))
        self._logits_TV.copy_(self.steps.decode([token]))
        if self.is_wrong and len(self.seen) % 8 == 0:
            self._logits_TV[0, 3] = torch.nextafter(self._logits_TV[0, 3], torch.tensor(0.0))
        return self._logits_TV


def choosing(
    monkeypatch: pytest.MonkeyPatch,
    wrong: Sequence[bool],
    seconds: Sequence[float],
    max_context: int = 512,
) -> tuple[str, list[str], Engine]:
    """The mode that "auto" chooses between split and full, and what was captured and replayed."""
    engine = tiny_engine(small_config((0, 4), 0), max_context=max_context)
    log: list[str] = []
    made = count()

    def make(mode: Mode) -> Any:
        return EagerDecoder(engine, mode, wrong[next(made)], log)

    clock = iter([0.0, seconds[0], 10.0, 10.0 + seconds[1]])
    monkeypatch.setattr(choose.time, "perf_counter", lambda: next(clock))
    steps: Any = engine.steps
    decoder = choose.build_decoder("auto", steps, engine.max_context, make)
    return decoder.mode, log, engine


@pytest.mark.parametrize(
    ("wrong", "seconds", "chosen"),
    [
        ((False, False), (1, 2), "split"),
        ((False, False), (2, 1), "full"),
        ((True, False), (1, 2), "full"),
        ((False, True), (2, 1), "split"),
    ],
)
def test_auto_takes_the_fastest_mode_that_is_exact(
    monkeypatch: pytest.MonkeyPatch,
    wrong: tuple[bool, bool],
    seconds: tuple[float, float],
    chosen: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "dsv4"):
        mode, log, engine = choosing(monkeypatch, wrong, seconds)
    assert mode == chosen
    # Of 8 steps each.
    found = ["different from" if is_wrong else "equal to" for is_wrong in wrong]
    assert caplog.messages == [
        f"cuda graph split: {seconds[0] * 125:.2f} ms/token, {found[0]} eager",
        f"cuda graph full: {seconds[1] * 125:.2f} ms/token, {found[1]} eager",
    ]
    assert log == ["capture split", "capture full"] + ["split"] * 16 + ["full"] * 16
    assert (engine.position, engine.state.furthest) == (0, 0)


def test_auto_refuses_when_no_mode_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no mode reproduces the eager logits"):
        choosing(monkeypatch, (True, True), (1, 1))


def test_a_self_check_is_of_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros of another sign are another computation."""
    engine = tiny_engine(small_config((0, 4), 0))
    zeros_TV = torch.zeros(1, engine.config.vocab_size)
    monkeypatch.setattr(engine.steps, "decode", lambda token_ids: zeros_TV)

    def make(mode: Mode) -> Any:
        made: Any = EagerDecoder(engine, mode, False, [])
        made.replay = lambda token, position: -zeros_TV
        return made

    steps: Any = engine.steps
    with pytest.raises(UserError, match="no mode reproduces the eager logits"):
        choose.build_decoder("auto", steps, engine.max_context, make)


def test_a_self_check_completes_windows_and_spreads_its_tokens() -> None:
    """Of both ratios, 4 and 128."""
    engine = tiny_engine(small_config((0, 4), 0))
    made: list[EagerDecoder] = []

    def make(mode: Mode) -> Any:
        made.append(EagerDecoder(engine, mode, False, []))
        return made[-1]

    steps: Any = engine.steps
    choose.build_decoder("auto", steps, engine.max_context, make)
    for decoder in made:
        tokens, positions = zip(*decoder.seen, strict=True)
        assert len(set(tokens)) == 8
        assert {position % 128 for position in positions} >= {127, 0}


@pytest.mark.parametrize("max_context", [1, 5, 125])
def test_auto_checks_itself_in_a_short_context(
    monkeypatch: pytest.MonkeyPatch, max_context: int
) -> None:
    mode, log, _ = choosing(monkeypatch, (False, False), (2, 1), max_context)
    assert (mode, len(log)) == ("full", 2 + 4 * min(max_context, 8))


@pytest.mark.parametrize("mode", ["split", "full"])
def test_a_mode_that_is_asked_for_is_not_checked(mode: Mode) -> None:
    engine = tiny_engine(small_config((0,), 0))
    log: list[str] = []

    def make(mode: Mode) -> Any:
        return EagerDecoder(engine, mode, True, log)

    steps: Any = engine.steps
    assert choose.build_decoder(mode, steps, 64, make).mode == mode
    assert log == [f"capture {mode}"]


@pytest.mark.parametrize("mode", ["auto", "split", "full"])
def test_graphs_need_a_gpu_and_the_cuda_ops(mode: Any) -> None:
    field = f"EngineConfig.cuda_graph='{mode}'"
    config = EngineConfig(cuda_graph=mode)
    with pytest.raises(UserError, match=f"{field}: found no CUDA device"):
        check_cuda_graph(config, (CPU,))
    with pytest.raises(UserError, match=f"{field}: found the torch ops"):
        check_cuda_graph(EngineConfig(cuda_graph=mode, ops="torch"), (GPU,))
    with pytest.raises(UserError, match=f"{field}: found the torch ops"):
        check_cuda_graph(EngineConfig(cuda_graph=mode, compute_dtype="float32"), (GPU,))
    check_cuda_graph(config, (GPU,))
    check_cuda_graph(EngineConfig(cuda_graph=mode, ops="cuda"), (GPU,))
    check_cuda_graph(EngineConfig(), (CPU,))


def test_unknown_mode_is_refused() -> None:
    unknown: Any = "half"
    with pytest.raises(UserError, match="cuda_graph: found 'half', expected one of auto, split"):
        EngineConfig(cuda_graph=unknown)


def test_cuda_ops_are_for_gpus_and_bfloat16() -> None:
    with pytest.raises(UserError, match="EngineConfig.ops: found 'cuda' on the CPU"):
        table_name(EngineConfig(ops="cuda"), (CPU,))
    assert table_name(EngineConfig(ops="cuda"), (GPU,)) == "cuda"
    assert table_name(EngineConfig(), (GPU,)) == "cuda"
    with pytest.raises(UserError, match="found 'cuda' with EngineConfig.compute_dtype='float32'"):
        EngineConfig(ops="cuda", compute_dtype="float32")


def test_the_cutedsl_table_differs_in_prefill_only() -> None:
    assert CUTEDSL_TABLE.packing is CUDA_TABLE.packing
    assert CUTEDSL_TABLE.decode is CUDA_TABLE.decode
    assert CUTEDSL_TABLE.prefill is not CUDA_TABLE.prefill


def test_the_cutedsl_table_needs_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str) -> Any:
        return None if name == "nvidia_cutlass_dsl" else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(UserError, match="'cutedsl' needs nvidia-cutlass-dsl, found none"):
        op_table("cutedsl")
