"""What the torch ops hold at once in a step: they allocate as they go, so it has to be counted."""

from dataclasses import dataclass

from dsv4.config import CSA_RATIO, ModelConfig
from dsv4.ops.attention import TILE_BYTES, TILE_TOKENS


@dataclass(frozen=True)
class TorchStep:
    """A step of ``tokens`` tokens in one layer of ``ratio``; ``itemsize`` of an activation.
    Properties are bytes.
    """

    config: ModelConfig
    itemsize: int
    tokens: int
    max_context: int
    ratio: int

    @property
    def workspace(self) -> int:
        """The most bytes alive at once, in the layer or while the logits behind it are computed."""
        logits = 2 * 4 * min(self.tokens, 8) * self.config.vocab_size
        return self.streams + max(self.attention, self.experts, logits)

    @property
    def entries(self) -> int:
        """Slots of the compressed cache."""
        return self.max_context // self.ratio + 1 if self.ratio else 0

    @property
    def selected(self) -> int:
        """Entries that attention reads for a token."""
        is_csa = self.ratio == CSA_RATIO
        return min(self.config.index_topk, self.entries) if is_csa else self.entries

    @property
    def streams(self) -> int:
        """Streams at the entrance of the segment, behind the layer before, before and behind
        attention; inputs and results of the sublayers, and the mixes.
        """
        config = self.config
        mixes = 4 * (config.hc_mult + 2) * config.hc_mult
        return self.tokens * (
            4 * (config.hc_mult + 1) * self.itemsize * config.hidden_size + 4 * mixes
        )

    @property
    def queries(self) -> int:
        """Bytes of the queries of attention."""
        return self.tokens * self.itemsize * self.config.num_attention_heads * self.config.head_dim

    @property
    def projections(self) -> int:
        """Products with the attention input: queries, key row, and float32 what compressors and
        indexer read.
        """
        config = self.config
        overlap = 2 if self.ratio == CSA_RATIO else 1
        per_token = self.itemsize * (config.head_dim + config.q_lora_rank)
        if self.ratio:
            per_token += 4 * 2 * overlap * config.head_dim
        if self.ratio == CSA_RATIO:
            width = config.index_n_heads * config.index_head_dim
            per_token += 4 * (2 * overlap * config.index_head_dim + config.index_n_heads)
            per_token += 2 * self.itemsize * width
        return self.queries + self.tokens * per_token

    @property
    def attention(self) -> int:
        """float32 queries and results, all rows dequantized, and of one tile logits and listed
        rows, several times each.
        """
        config = self.config
        keys = config.sliding_window + TILE_TOKENS + self.selected
        per_token = 4 * config.num_attention_heads * keys
        tile = min(self.tokens, TILE_TOKENS, max(1, TILE_BYTES // per_token))
        listed = self.selected if self.ratio == CSA_RATIO else 0
        rows = 4 * config.head_dim * (3 * self.entries + 2 * tile * listed)
        scores = 0
        if self.ratio == CSA_RATIO:
            per_token = 4 * config.index_n_heads * self.entries
            at_once = min(self.tokens, max(1, TILE_BYTES // per_token))
            scores = 3 * at_once * per_token + 4 * config.index_head_dim * 3 * self.entries
        float_queries = 4 * self.queries // self.itemsize
        attending = 4 * tile * 4 * config.num_attention_heads * keys + rows + 4 * float_queries
        return self.projections + self.queries + 8 * self.tokens * listed + max(attending, scores)

    @property
    def experts(self) -> int:
        """float32 input, hidden rows and result, at worst of all tokens in one expert."""
        config = self.config
        per_token = 4 * config.hidden_size + 5 * config.moe_intermediate_size
        return self.tokens * 4 * (per_token + 2 * config.n_routed_experts)
