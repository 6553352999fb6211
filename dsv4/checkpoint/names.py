"""Tensor names: the three dialects in use and the rename table between them
(model.md#tensor-names).

* native: DeepSeek's own, ``layers.0.attn.wq_a.weight``; everything else in this package speaks
  native only;
* hf: the module names of transformers, ``model.layers.0.self_attn.q_a_proj.weight``;
* hybrid: what ``save_pretrained`` of transformers 5 writes, ``model.layers.0.attn.wq_a.weight``.

``mtp.*`` has native names in all three. A name is ``module.component``; ``.scale`` is
``.weight_scale_inv`` in hf. Fused experts of hf become ``layers.N.ffn.experts.w13.weight`` (gate
rows, then up rows) and ``….experts.w2.weight``.
"""

import enum
import re
from collections.abc import Iterable

from dsv4.checkpoint.problems import printable
from dsv4.errors import UserError


class Dialect(enum.Enum):
    """Whose names a checkpoint uses."""

    NATIVE = "native"
    HF = "hf"
    HYBRID = "hybrid"


_GLOBAL_MODULES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_GLOBAL_LEAVES = {f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")}
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_COMPRESSOR = {"wkv": "kv_proj", "wgate": "gate_proj", "norm": "kv_norm"}
_BLOCK_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    **{
        f"attn.compressor.{ours}": f"self_attn.compressor.{theirs}"
        for ours, theirs in _COMPRESSOR.items()
    },
    **{
        f"attn.indexer.compressor.{ours}": f"self_attn.compressor.indexer.{theirs}"
        for ours, theirs in _COMPRESSOR.items()
    },
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "ffn.gate": "mlp.gate",
    **{
        f"ffn.shared_experts.{ours}": f"mlp.shared_experts.{theirs}"
        for ours, theirs in _PROJECTIONS.items()
    },
}
_BLOCK_LEAVES = {
    **{
        f"hc_{sub}_{part}": f"{sub}_hc.{part}"
        for sub in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.experts.w13.weight": "mlp.experts.gate_up_proj",
    "ffn.experts.w13.scale": "mlp.experts.gate_up_proj_scale_inv",
    "ffn.experts.w2.weight": "mlp.experts.down_proj",
    "ffn.experts.w2.scale": "mlp.experts.down_proj_scale_inv",
}
_OLDER_BLOCK_MODULES = {"self_attn.compressor.indexer.weights_proj": "attn.indexer.weights_proj"}


def _inverse(table: dict[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in table.items()}


_NATIVE_GLOBAL_MODULES = _inverse(_GLOBAL_MODULES)
_NATIVE_GLOBAL_LEAVES = _inverse(_GLOBAL_LEAVES)
_NATIVE_BLOCK_MODULES = {**_inverse(_BLOCK_MODULES), **_OLDER_BLOCK_MODULES}
_NATIVE_BLOCK_LEAVES = _inverse(_BLOCK_LEAVES)
_NATIVE_PROJECTIONS = _inverse(_PROJECTIONS)

_BLOCK = re.compile(r"(layers\.[0-9]+)\.(.+)", re.DOTALL)
_EXPERT = re.compile(r"ffn\.experts\.([0-9]+)\.(w[123])")
_HF_EXPERT = re.compile(r"mlp\.experts\.([0-9]+)\.(gate_proj|up_proj|down_proj)")
_NATIVE_PARTS = re.compile(r"(attn|ffn|attn_norm|ffn_norm)\.|hc_(attn|ffn)_(fn|base|scale)$")
_NUMBER = re.compile("[0-9]+")
_NUMBERED_SHARED_EXPERT = re.compile(r"shared_experts\.[0-9]+\.")


def to_native(name: str, dialect: Dialect) -> str | None:
    """Native name of a tensor, or None when ``dialect`` has no such name."""
    if name.startswith("mtp."):
        return name
    if dialect is Dialect.NATIVE:
        known = (
            _BLOCK.fullmatch(name)
            or name in _GLOBAL_LEAVES
            or name.partition(".")[0] in _GLOBAL_MODULES
        )
        return name if known else None
    if dialect is Dialect.HYBRID and name.startswith("head."):
        return name
    block = _BLOCK.fullmatch(name.removeprefix("model.")) if name.startswith("model.") else None
    if block is None:
        return (
            None
            if dialect is Dialect.HYBRID and name.startswith("lm_head.")
            else _global_to_native(name)
        )
    convert = _hybrid_block_to_native if dialect is Dialect.HYBRID else _hf_block_to_native
    inside = convert(block[2])
    return None if inside is None else f"{block[1]}.{inside}"


def from_native(name: str, dialect: Dialect) -> str:
    """Name of a native tensor in ``dialect``; the inverse of ``to_native``."""
    if dialect is Dialect.NATIVE or (dialect is Dialect.HYBRID and name.startswith("head.")):
        return name
    block = _BLOCK.fullmatch(name)
    if block is None:
        return _GLOBAL_LEAVES.get(name) or _rename_module(name, _GLOBAL_MODULES, to_hf=True) or name
    convert = _hybrid_block_from_native if dialect is Dialect.HYBRID else _hf_block_from_native
    return f"model.{block[1]}.{convert(block[2])}"


def _global_to_native(name: str) -> str | None:
    return _NATIVE_GLOBAL_LEAVES.get(name) or _rename_module(
        name, _NATIVE_GLOBAL_MODULES, to_hf=False
    )


def _hybrid_block_to_native(inside: str) -> str | None:
    if inside.startswith("attn.norm."):
        return inside.replace("attn.norm.", "attn.kv_norm.", 1)
    return (
        inside if _NATIVE_PARTS.match(inside) and not inside.startswith("attn.kv_norm.") else None
    )


def _hybrid_block_from_native(inside: str) -> str:
    return inside.replace("attn.kv_norm.", "attn.norm.", 1)


def _hf_block_to_native(inside: str) -> str | None:
    if inside in _NATIVE_BLOCK_LEAVES:
        return _NATIVE_BLOCK_LEAVES[inside]
    module, _, component = inside.rpartition(".")
    expert = _HF_EXPERT.fullmatch(module)
    if expert is not None:
        projection = _NATIVE_PROJECTIONS[expert[2]]
        return f"ffn.experts.{expert[1]}.{projection}.{_component(component, to_hf=False)}"
    return _rename_module(inside, _NATIVE_BLOCK_MODULES, to_hf=False)


def _hf_block_from_native(inside: str) -> str:
    if inside in _BLOCK_LEAVES:
        return _BLOCK_LEAVES[inside]
    module, _, component = inside.rpartition(".")
    expert = _EXPERT.fullmatch(module)
    if expert is not None:
        return (
            f"mlp.experts.{expert[1]}.{_PROJECTIONS[expert[2]]}.{_component(component, to_hf=True)}"
        )
    return _rename_module(inside, _BLOCK_MODULES, to_hf=True) or inside


def _rename_module(name: str, table: dict[str, str], *, to_hf: bool) -> str | None:
    module, _, component = name.rpartition(".")
    return f"{table[module]}.{_component(component, to_hf=to_hf)}" if module in table else None


def _component(component: str, *, to_hf: bool) -> str:
    ours = "scale"
    theirs = "weight_scale_inv"
    if to_hf:
        return theirs if component == ours else component
    return ours if component == theirs else component


def detect_dialect(names: Iterable[str], source: str) -> Dialect:
    """The dialect that all names with a known form share; names without one are left for the strict
    comparison.

    Raises ``UserError`` for a mixture, for the shared-expert names of broken re-saves, and when no
    name is known.
    """
    possible = set(Dialect)
    witness = {}
    # Names that differ in numbers have the same forms, and there are hundreds of thousands.
    for name in {_NUMBER.sub("0", name): name for name in names}.values():
        if name.endswith(".weight.weight") and _NUMBERED_SHARED_EXPERT.search(name):
            raise UserError(
                f"{source}: found {printable(name)}, a known damage of re-saved checkpoints, "
                "expected shared_experts.w1, w2, w3: save or download the checkpoint again"
            )
        forms = frozenset(dialect for dialect in Dialect if to_native(name, dialect) is not None)
        if forms and forms not in witness:
            witness[forms] = name
            possible &= forms
    if not possible:
        shown = {
            printable(name): "/".join(sorted(form.value for form in forms))
            for forms, name in witness.items()
        }
        examples = ", ".join(f"{name} ({forms})" for name, forms in shown.items())
        raise UserError(
            f"{source}: found tensor names of different dialects: {examples}, expected one dialect"
        )
    if not any(len(forms) < len(Dialect) for forms in witness):
        raise UserError(
            f"{source}: found no DeepSeek-V4 tensor name, expected native or Hugging Face names"
        )
    return next(dialect for dialect in Dialect if dialect in possible)
