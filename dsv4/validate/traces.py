"""The compared values: the streams after every layer, the final hidden state and the logits, from
an engine or from transformers.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.checkpoint import Dialect
from dsv4.checkpoint.export import export
from dsv4.config import layer_kinds
from dsv4.decode import CUDAGraphDecoder, Mode
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.ops.tables import TableName, swap_ops
from dsv4.step.steps import RecordedSteps

Trace = dict[str, Any]


def engine_trace(
    model: Path, token_ids: list[int], config: EngineConfig, swaps: Mapping[str, TableName]
) -> tuple[Trace, list[str]]:
    """``Engine.trace`` of a fresh engine with some ops swapped, and the kind of every layer (SWA,
    CSA, HCA).

    With ``config.cuda_graph`` "split" or "full" it is the trace of that mode's replays, token by
    token.
    """
    eager = replace(config, cuda_graph=None)
    engine = Engine.load(model, eager, change_table=lambda table: swap_ops(table, swaps))
    kinds = list(layer_kinds(engine.config))
    if config.cuda_graph is None or config.cuda_graph == "auto":
        return engine.trace(token_ids), kinds
    return graph_trace(engine, token_ids, config.cuda_graph), kinds


def graph_trace(engine: Engine, token_ids: list[int], mode: Mode) -> Trace:
    """The result of ``Engine.trace``, from replayed one-token steps on a fresh sequence.

    Raises ``UserError`` for an engine with the torch ops.
    """
    if not isinstance(engine.steps, RecordedSteps):
        raise UserError(f"EngineConfig.cuda_graph={mode!r}: found the torch ops, expected 'cuda'")
    engine.reset()
    decoder = CUDAGraphDecoder(engine.steps, mode, engine.max_context, traced=True)
    step = decoder.step(1)
    streams = list(step.values().values())
    found: list[list[Tensor]] = []
    for position, token in enumerate(token_ids):
        logits_TV = decoder.replay(token, position)
        found.append([tensor.cpu() for tensor in (*streams, step.hidden_TE, logits_TV)])
    *layers, final, logits = (torch.cat(parts) for parts in zip(*found, strict=True))
    return {"layers": layers, "final": final, "logits": logits}


def transformers_trace(model: Path, token_ids: list[int]) -> Trace:
    """The same of transformers' DeepseekV4ForCausalLM in float32, from the checkpoint decoded to
    float32.

    Nothing is quantised there but the weights, so compare with ``--kv-dtype bf16``. Raises
    ``UserError`` when transformers is not installed.
    """
    try:
        from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM
    except ImportError:
        raise UserError(
            "--reference: transformers with DeepseekV4ForCausalLM is not installed"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        export(model, Path(folder) / "f32", "f32", Dialect.HF)
        reference = DeepseekV4ForCausalLM.from_pretrained(
            Path(folder) / "f32", dtype=torch.float32, attn_implementation="eager"
        ).eval()
    layers: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output: layers.append(output[0]))
        for layer in reference.model.layers
    ]
    with torch.inference_mode():
        output = reference(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {"layers": layers, "final": output.hidden_states[-1][0], "logits": output.logits[0]}
