"""The shapes of a layer's values (traces.md#values), which are known before it has run."""

from dsv4.config import ModelConfig
from dsv4.validate.names import ENTRY_ROWS, layer_of, suffix


def layer_shape(config: ModelConfig, name: str, tokens: int) -> list[int]:
    """Of a value of a layer from position 0 on. Ids and what belongs to them may have fewer columns
    than they say here.
    """
    layer = layer_of(name)
    assert layer is not None
    value = suffix(name)
    rows = tokens // config.compress_ratios[layer] if value in ENTRY_ROWS else tokens
    return [rows, *_widths(config)[value]]


def _widths(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    streams = config.hc_mult
    hidden = config.hidden_size
    seam = {
        "streams": (streams, hidden),
        "post": (streams,),
        "comb": (streams, streams),
        "x": (hidden,),
    }
    heads = (config.num_attention_heads, config.head_dim)
    return {
        **{f"attn_hc.{part}": width for part, width in seam.items()},
        "attn.q": heads,
        "attn.kv": (config.head_dim,),
        "attn.compressed": (config.head_dim,),
        "indexer.q": (config.index_n_heads, config.index_head_dim),
        "indexer.weights": (config.index_n_heads,),
        "indexer.keys": (config.index_head_dim,),
        "indexer.scores": (config.index_topk,),
        "indexer.entries": (config.index_topk,),
        "attn.heads": heads,
        "attn.output": (hidden,),
        **{f"ffn_hc.{part}": width for part, width in seam.items()},
        "router.experts": (config.num_experts_per_tok,),
        "router.weights": (config.num_experts_per_tok,),
        "ffn.output": (hidden,),
        "streams": (streams, hidden),
    }
