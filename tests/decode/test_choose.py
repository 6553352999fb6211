"""Which decoder is chosen, where graphs are refused before a weight is read, and the op tables of a GPU."""

import importlib.util
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, UserError
from dsv4.decode import Mode, check_cuda_graph, choose
from dsv4.ops import TableName, op_table
from dsv4.placement import table_name
from dsv4.quant import QuantTensor
from tests.model.tiny import small_config, tiny_engine

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class EagerDecoder:
    """Stands for ``CUDAGraphDecoder`` without a GPU: its replays are eager steps, wrong by ``error``."""

    def __init__(self, engine: Engine, mode: Mode, error: float, log: list[str]) -> None:
        self.model, self.state, self.max_context = engine.model, engine.state, engine.max_context
        self.mode, self.error, self.captured, self.log = mode, error, False, log

    def capture(self) -> None:
        assert self.state.position < self.max_context, "no room for the step of a capture"
        self.captured = True

    def replay(self, token: int, position: int) -> Tensor:
        self.log.append(self.mode if self.captured else "eager")
        assert position == self.state.position
        self.state.advance(1)
        logits = self.model.logits(self.model(self.state.token_input([token]), self.state))
        return logits + self.error if self.captured else logits


def choosing(
    monkeypatch: pytest.MonkeyPatch, errors: Sequence[float], seconds: Sequence[float], max_context: int = 512
) -> tuple[str, list[str], Engine]:
    """The mode that "auto" chooses between split and full, and whose steps ran."""
    engine, log = tiny_engine(small_config((0, 4), 0), max_context=max_context), []
    made = count()

    def make(_model: Any, _state: Any, _ops: Any, mode: Mode, _max_context: int) -> EagerDecoder:
        return EagerDecoder(engine, mode, errors[next(made)], log)

    clock = iter([0.0, seconds[0], 10.0, 10.0 + seconds[1]])
    monkeypatch.setattr(choose, "CUDAGraphDecoder", make)
    monkeypatch.setattr(choose.time, "perf_counter", lambda: next(clock))
    config = EngineConfig(cuda_graph="auto")
    decoder = choose.build_decoder(config, engine.model, engine.state, engine.ops, engine.max_context)
    assert decoder is not None
    return decoder.mode, log, engine


@pytest.mark.parametrize(
    ("errors", "seconds", "chosen"),
    [((0, 0), (1, 2), "split"), ((0, 0), (2, 1), "full"), ((1e-3, 0), (1, 2), "full"), ((0, 1e-3), (2, 1), "split")],
)
def test_auto_takes_the_fastest_mode_that_is_exact(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[float, float], seconds: tuple[float, float], chosen: str
) -> None:
    mode, log, engine = choosing(monkeypatch, errors, seconds)
    assert mode == chosen
    assert log == ["eager"] * 8 + ["split"] * 16 + ["full"] * 16
    assert (engine.position, engine.state.furthest) == (0, 0)


def test_auto_refuses_when_no_mode_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no mode reproduces the eager logits"):
        choosing(monkeypatch, (1e-3, 1e-3), (1, 1))


@pytest.mark.parametrize("max_context", [1, 5, 125])
def test_auto_checks_itself_in_a_short_context(monkeypatch: pytest.MonkeyPatch, max_context: int) -> None:
    mode, log, _ = choosing(monkeypatch, (0, 0), (2, 1), max_context)
    assert (mode, len(log)) == ("full", 5 * min(max_context, 8))


@pytest.mark.parametrize("mode", ["auto", "split", "full"])
def test_graphs_need_a_gpu_and_the_cuda_ops(mode: str) -> None:
    config = EngineConfig(cuda_graph=mode)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=f"--cuda-graph {mode}: found no CUDA device"):
        check_cuda_graph(config, (CPU,), "torch")
    with pytest.raises(UserError, match=f"--cuda-graph {mode}: found the torch ops"):
        check_cuda_graph(config, (GPU,), "torch")
    for table in ("cuda", "cutedsl"):
        check_cuda_graph(config, (GPU,), table)
    check_cuda_graph(EngineConfig(), (CPU,), "torch")


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(UserError, match="cuda_graph: found 'half', expected one of auto, split, full, None"):
        EngineConfig(cuda_graph="half")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("table", ["cuda", "cutedsl"])
def test_cuda_tables_are_for_gpus_and_bfloat16(table: TableName) -> None:
    with pytest.raises(UserError, match=f"--ops: found '{table}' on the CPU"):
        table_name(EngineConfig(ops=table), (CPU,))
    assert table_name(EngineConfig(ops=table), (GPU,)) == table
    assert table_name(EngineConfig(), (GPU,)) == "cuda"
    with pytest.raises(UserError, match=f"found '{table}' with compute_dtype float32"):
        EngineConfig(ops=table, compute_dtype="float32")


def test_the_cutedsl_table_differs_in_how_it_packs() -> None:
    from dsv4.ops.tables import CUDA, CUTEDSL

    weight = QuantTensor.dense(torch.ones(64, 64, dtype=torch.bfloat16))
    for table, cutedsl in ((CUDA, False), (CUTEDSL, True)):
        assert table.pack_weight(weight).cutedsl is cutedsl  # pyright: ignore[reportAttributeAccessIssue]
        assert table.pack_rows([weight], [None]).weights[0].cutedsl is cutedsl  # pyright: ignore[reportAttributeAccessIssue]


def test_the_cutedsl_table_needs_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nvidia_cutlass_dsl" else found(name))
    with pytest.raises(UserError, match="--ops: cutedsl needs nvidia-cutlass-dsl, found none"):
        op_table("cutedsl")
