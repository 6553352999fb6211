"""Where graphs are refused before a weight is read, and the op tables that a GPU can be asked for."""

import importlib.util

import pytest
import torch

from dsv4 import EngineConfig, UserError
from dsv4.decode import check_cuda_graph
from dsv4.ops import TableName, op_table
from dsv4.placement import table_name
from dsv4.quant import QuantTensor

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
    from dsv4.ops.cuda import CUDA, CUTEDSL

    weight = QuantTensor.dense(torch.ones(64, 64, dtype=torch.bfloat16))
    for table, cutedsl in ((CUDA, False), (CUTEDSL, True)):
        assert table.pack_weight(weight).cutedsl is cutedsl  # pyright: ignore[reportAttributeAccessIssue]
        assert table.pack_rows([weight], [None]).weights[0].cutedsl is cutedsl  # pyright: ignore[reportAttributeAccessIssue]


def test_the_cutedsl_table_needs_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nvidia_cutlass_dsl" else found(name))
    with pytest.raises(UserError, match="--ops: cutedsl needs nvidia-cutlass-dsl, found none"):
        op_table("cutedsl")
