"""The compared values: the streams after every layer, the final hidden state and the logits, from
an engine or from transformers.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsv4.checkpoint import Dialect
from dsv4.checkpoint.export import export
from dsv4.config import layer_kinds
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.ops.tables import TableName, swap_ops
from dsv4.trace.write import write_trace

Trace = dict[str, Any]


def engine_trace(
    model: Path, token_ids: list[int], config: EngineConfig, swaps: Mapping[str, TableName]
) -> tuple[Trace, list[str]]:
    """``Engine.trace`` of a fresh engine with some ops swapped, and the kind of every layer (SWA,
    CSA, HCA).

    With ``config.cuda_graph`` "split" or "full" it is the trace of that mode's replays, token by
    token.
    """
    engine = _load(model, config, swaps)
    return block_trace(engine, token_ids, _prompt_tokens(config)), list(layer_kinds(engine.config))


def write_engine_trace(
    path: Path,
    model: Path,
    token_ids: list[int],
    config: EngineConfig,
    swaps: Mapping[str, TableName],
    names: Sequence[str],
) -> None:
    """Writes the values ``names`` to the trace file ``path``, of an engine as that of
    ``engine_trace``. Raises ``UserError`` for a value that it does not have.
    """
    engine = _load(model, config, swaps)
    write_trace(engine, token_ids, path, names, _prompt_tokens(config), model.resolve().name)


def block_trace(engine: Engine, token_ids: list[int], prompt_tokens: int | None = None) -> Trace:
    """The streams after every layer, the final hidden state and the logits of ``Engine.trace``."""
    at = ("layers.*.streams", "hidden", "logits")
    values = engine.trace(token_ids, at, prompt_tokens)
    layers = [values[f"layers.{layer}.streams"] for layer in range(engine.config.num_hidden_layers)]
    return {"layers": layers, "final": values["hidden"], "logits": values["logits"]}


def _load(model: Path, config: EngineConfig, swaps: Mapping[str, TableName]) -> Engine:
    return Engine.load(model, config, change_table=lambda table: swap_ops(table, swaps))


def _prompt_tokens(config: EngineConfig) -> int | None:
    """None of them when steps are replayed: a replay has one token."""
    return None if config.cuda_graph in (None, "auto") else 0


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
