"""A trace of transformers' DeepseekV4ForCausalLM (5.23.0), every value of docs/traces.md:
``python docs/hooks/transformers_trace.py MODEL OUT.safetensors --prompt "Hello"``.

MODEL is a checkpoint that transformers loads, in float32 and with eager attention; ``python -m
dsv4.checkpoint.export`` writes one. Compare with ``--kv-dtype bf16 --compute-dtype float32``:
nothing is quantised here but the weights.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trace_writer import TraceWriter
from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM, modeling_deepseek_v4

AFTER_ENTRIES = 1 << 62


def trace(model: DeepseekV4ForCausalLM, token_ids: list[int], writer: TraceWriter) -> None:
    """One forward pass over the tokens, without a cache."""
    ids = torch.tensor([token_ids])
    writer.begin(ids[0], torch.arange(len(token_ids)))
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        for index, layer in enumerate(model.model.layers):
            _hook_layer(layer, Values(writer, f"layers.{index}.", stack))
        stack.enter_context(_hooked_attention(model, writer))
        outer = Values(writer, "", stack)
        outer.after(model.model.norm, lambda output: outer.add("hidden", output[0]))
        logits = model(ids, use_cache=False).logits[0]
    writer.add("logits", logits.float())


class Values:
    """Hooks of one layer, which add values under its prefix."""

    def __init__(self, writer: TraceWriter, prefix: str, stack: ExitStack) -> None:
        self._writer = writer
        self._prefix = prefix
        self._stack = stack

    def add(self, name: str, rows: Tensor) -> None:
        self._writer.add(self._prefix + name, rows)

    def before(self, module: nn.Module, see: Callable[[tuple], None]) -> None:
        """``see`` gets the module's positional arguments."""
        handle = module.register_forward_pre_hook(lambda _module, arguments: see(arguments))
        self._stack.callback(handle.remove)

    def after(self, module: nn.Module, see: Callable[[Any], None]) -> None:
        """``see`` gets what the module returns."""
        handle = module.register_forward_hook(lambda _module, _arguments, output: see(output))
        self._stack.callback(handle.remove)


def _hook_layer(layer: nn.Module, values: Values) -> None:
    for name, seam, norm in (
        ("attn_hc", layer.attn_hc, layer.input_layernorm),
        ("ffn_hc", layer.ffn_hc, layer.post_attention_layernorm),
    ):
        _hook_seam(name, seam, norm, values)
    attention = layer.self_attn
    shape = (attention.num_heads, attention.head_dim)
    values.before(
        attention.o_a_proj,
        lambda arguments: values.add("attn.heads", arguments[0][0].reshape(-1, *shape)),
    )
    values.after(attention, lambda output: values.add("attn.output", output[0][0]))
    if attention.layer_type == "compressed_sparse_attention":
        _hook_indexer(attention.compressor.indexer, values)

    def routed(output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, weights, experts = output
        values.add("router.experts", experts)
        values.add("router.weights", weights.float())

    values.after(layer.mlp.gate, routed)
    values.after(layer.mlp, lambda output: values.add("ffn.output", output[0]))
    values.after(layer, lambda output: values.add("streams", output[0]))


def _hook_seam(name: str, seam: nn.Module, norm: nn.Module, values: Values) -> None:
    def mixed(output: tuple[Tensor, Tensor, Tensor]) -> None:
        post, comb, _ = output
        values.add(f"{name}.post", post[0].float())
        values.add(f"{name}.comb", comb[0].float())

    values.before(seam, lambda arguments: values.add(f"{name}.streams", arguments[0][0]))
    values.after(seam, mixed)
    values.after(norm, lambda output: values.add(f"{name}.x", output[0]))


def _hook_indexer(indexer: nn.Module, values: Values) -> None:
    """The scorer's queries and keys are not rotated by Hadamard, which changes no score."""
    scores: list[Tensor] = []

    def scored(arguments: tuple[Tensor, Tensor, Tensor]) -> None:
        queries, keys, _ = arguments
        values.add("indexer.q", hadamard(queries[0]))
        values.add("indexer.keys", hadamard(keys[0]))

    def chosen(output: Tensor) -> None:
        entries = output[0].where(output[0] >= 0, AFTER_ENTRIES).sort().values
        none = entries == AFTER_ENTRIES
        found = scores.pop()[0].gather(1, entries.masked_fill(none, 0))
        values.add("indexer.entries", entries.masked_fill(none, -1))
        values.add("indexer.scores", found.float().masked_fill(none, -torch.inf))

    values.after(
        indexer.scorer.weights_proj,
        lambda output: values.add("indexer.weights", output[0].float()),
    )
    values.before(indexer.scorer, scored)
    values.after(indexer.scorer, scores.append)
    values.after(indexer, chosen)


@contextmanager
def _hooked_attention(model: DeepseekV4ForCausalLM, writer: TraceWriter) -> Iterator[None]:
    """Queries and keys as the attention function gets them: window keys, then compressed rows."""
    original = modeling_deepseek_v4.eager_attention_forward
    compressed = {
        module.layer_idx: module.compressor is not None
        for module in model.modules()
        if isinstance(module, modeling_deepseek_v4.DeepseekV4Attention)
    }

    def attention(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
        prefix = f"layers.{module.layer_idx}."
        tokens = query.shape[2]
        writer.add(f"{prefix}attn.q", query[0].transpose(0, 1))
        writer.add(f"{prefix}attn.kv", key[0, 0, :tokens])
        if compressed[module.layer_idx]:
            writer.add(f"{prefix}attn.compressed", key[0, 0, tokens:])
        return original(module, query, key, *rest, **named)

    modeling_deepseek_v4.eager_attention_forward = attention
    try:
        yield
    finally:
        modeling_deepseek_v4.eager_attention_forward = original


def hadamard(x: Tensor) -> Tensor:
    """Times the orthonormal Hadamard matrix of Sylvester's order, in float32."""
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (x.float() @ matrix * x.shape[-1] ** -0.5).to(x.dtype)


def vocabulary_of(writer: TraceWriter) -> int:
    """How many tokens the model knows. Raises ``ValueError``."""
    found = json.loads(writer.config).get("vocab_size")
    if type(found) is not int:
        where = f"{writer.folder}/config.json: vocab_size"
        raise ValueError(f"{where}: found {found!r}, expected an integer")
    return found


def read_ids(options: argparse.Namespace, vocabulary: int) -> list[int]:
    """The tokens of the prompt. Raises ``ValueError`` for none, for what the model lacks, and when
    the trace would replace their file.
    """
    if options.prompt is None:
        if options.out.exists() and options.out.samefile(options.token_ids):
            raise ValueError(f"{options.out}: found the file of --token-ids, expected another one")
        try:
            ids = json.loads(options.token_ids.read_text(encoding="utf-8-sig"))
        except ValueError:
            ids = None
    else:
        from tokenizers import Tokenizer

        if options.prompt != options.prompt.encode(errors="replace").decode():
            raise ValueError("--prompt: found bytes that are no UTF-8, expected text")
        file = options.model / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_buffer(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file}: found no tokenizer ({error}), expected one") from None
        ids = tokenizer.encode(options.prompt, add_special_tokens=False).ids
    known = range(vocabulary)
    if (
        isinstance(ids, list)
        and ids
        and all(type(token) is int and token in known for token in ids)
    ):
        return ids
    if options.prompt is not None:
        raise ValueError("--prompt: found no token, expected text")
    expected = f"a JSON list of at least one id from 0 to {vocabulary - 1}"
    raise ValueError(f"{options.token_ids}: expected {expected}")


def main(argv: list[str] | None = None) -> int:
    """The command. What is wrong with its arguments shows before the model is loaded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="plain text")
    what.add_argument("--token-ids", type=Path, help="a JSON list of token ids")
    options = parser.parse_args(argv)
    try:
        writer = TraceWriter("transformers", options.model)
        writer.check(options.out)
        token_ids = read_ids(options, vocabulary_of(writer))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    model = DeepseekV4ForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    trace(model, token_ids, writer)
    print(f"{writer.save(options.out)}: {len(token_ids)} tokens, {len(writer.parts)} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
