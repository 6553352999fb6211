"""Memory that comes and goes: what packing a weight, and the longest step, hold besides weights and state.

The terms are the allocations of the CUDA ops (or of the torch ops) at the moment of a layer when most of them are
alive; ``tests/test_working_memory.py`` holds them against measured peaks.
"""

from dataclasses import dataclass

import torch

from dsv4.config import CSA_RATIO, EngineConfig, ModelConfig
from dsv4.ops import TableName
from dsv4.parameters import Parameter, Role
from dsv4.quant import QuantFormat
from dsv4.state import COMPUTE_DTYPES, ring_slots, step_tokens

# What the CUDA driver takes for kernels and graphs and torch for blocks between those in use.
CUDA_RESERVE_BYTES = 512 << 20
# Limits of the launchers: scores of the indexer, workspace and token tile of the experts, partial sums of a GEMM.
INDEX_SCORE_BYTES, MOE_WORKSPACE_BYTES, TILE_TOKENS, GEMM_PARTIAL_BYTES = 256 << 20, 1 << 30, 128, 24 << 20
# Limits of the torch ops: tokens of an attention tile, bytes of the logits of a tile.
TORCH_TILE_TOKENS, TORCH_TILE_BYTES = 64, 64 << 20
# Copies of a matrix, in its own bytes, that are alive while its 4-bit codes or its values are put in another order; and
# float32 copies, the result included, while the torch ops decode a quantised one.
_CODE_COPIES, _VALUE_COPIES, _DECODING_COPIES = 8, 2, 4


def is_packed(parameter: Parameter) -> bool:
    """Whether the op table packs it: the embedding is looked up, and the speculative module kept, as stored."""
    is_matrix = parameter.role in (Role.LINEAR, Role.EXPERT, Role.FLOOR)
    return is_matrix and not parameter.name.startswith(("embed.", "mtp."))


def packing_bytes(parameter: Parameter, format: QuantFormat | None, nbytes: int, table: TableName) -> int:
    """What packing a stored parameter of ``nbytes`` takes besides it and, for the torch ops, besides the result."""
    if format is None or not is_packed(parameter):
        return 0
    dense = format in (QuantFormat.BF16, QuantFormat.F32)
    if table == "torch":
        return 0 if dense else (_DECODING_COPIES - 1) * 4 * torch.Size(parameter.shape).numel()
    # A stack is allocated whole (F32 is rounded first) and filled matrix by matrix; only then the stored one goes.
    stack = 2 * nbytes if format is QuantFormat.F32 else nbytes
    matrices = parameter.shape[0] if parameter.role is Role.EXPERT else 1
    return stack + (_VALUE_COPIES if format.group_size is None else _CODE_COPIES) * (nbytes // matrices)


def step_bytes(config: ModelConfig, engine: EngineConfig, max_context: int, ratio: int, table: TableName) -> int:
    """The most that a step holds at once while it is in a layer of ``ratio``, or computes the logits behind it."""
    step = _Step(config, engine, min(step_tokens(engine), max_context), max_context, ratio)
    logits = 2 * 4 * min(step.tokens, 8) * config.vocab_size
    if table == "torch":
        return step.streams + max(step.torch_attention, step.torch_experts, logits)
    return step.streams + max(step.attention, step.experts, logits)


@dataclass(frozen=True)
class _Step:
    """A step of ``tokens`` tokens in one layer. Properties are bytes."""

    config: ModelConfig
    engine: EngineConfig
    tokens: int
    max_context: int
    ratio: int

    @property
    def item(self) -> int:
        """Of an activation."""
        return COMPUTE_DTYPES[self.engine.compute_dtype].itemsize

    @property
    def entries(self) -> int:
        """Slots of the compressed cache."""
        return self.max_context // self.ratio + 1 if self.ratio else 0

    @property
    def selected(self) -> int:
        """Entries that attention reads for a token."""
        return min(self.config.index_topk, self.entries) if self.ratio == CSA_RATIO else self.entries

    @property
    def streams(self) -> int:
        """Streams at the entrance of the segment, behind the layer before, before and behind attention; inputs and
        results of the sublayers, and the mixes.
        """
        config = self.config
        mixes = 4 * (config.hc_mult + 2) * config.hc_mult
        return self.tokens * (4 * (config.hc_mult + 1) * self.item * config.hidden_size + 4 * mixes)

    @property
    def queries(self) -> int:
        return self.tokens * self.item * self.config.num_attention_heads * self.config.head_dim

    @property
    def projections(self) -> int:
        """Products with the attention input: queries, key row, and float32 what compressors and indexer read."""
        config, overlap = self.config, 2 if self.ratio == CSA_RATIO else 1
        per_token = self.item * (config.head_dim + config.q_lora_rank)
        if self.ratio:
            per_token += 4 * 2 * overlap * config.head_dim
        if self.ratio == CSA_RATIO:
            width = config.index_n_heads * config.index_head_dim
            per_token += 4 * (2 * overlap * config.index_head_dim + config.index_n_heads) + 2 * self.item * width
        return self.queries + self.tokens * per_token

    @property
    def attention(self) -> int:
        """Rotated queries beside the projections, then in turn scores, decoded keys with results, output products."""
        config, tokens = self.config, self.tokens
        scores = keys = chosen = 0
        if self.ratio == CSA_RATIO:
            chosen = 8 * tokens * self.selected
            scores = min(4 * tokens * (self.entries + 3), max(INDEX_SCORE_BYTES, 4 * (self.entries + 3)))
        if self.engine.kv_dtype == "fp8":
            keys = 2 * config.head_dim * (ring_slots(config, self.engine) + self.entries)
        outputs = tokens * self.item * (config.o_groups * config.o_lora_rank) + GEMM_PARTIAL_BYTES
        return self.projections + self.queries + chosen + max(scores, self.queries + max(keys, outputs))

    @property
    def experts(self) -> int:
        """Sorted hidden rows and their products, float32, of as many tokens as the workspace holds; router logits."""
        config = self.config
        width, inner = config.hidden_size, config.moe_intermediate_size
        per_token = config.num_experts_per_tok * (4 * width + 2 * inner) + 4 * width + 2 * inner
        together = min(self.tokens, max(TILE_TOKENS, MOE_WORKSPACE_BYTES // per_token))
        routing = self.tokens * (4 * config.n_routed_experts + 24 * config.num_experts_per_tok)
        return together * per_token + routing + GEMM_PARTIAL_BYTES

    @property
    def torch_attention(self) -> int:
        """float32 queries and results, all rows decoded, and of one tile logits and listed rows, several times each."""
        config, tokens = self.config, self.tokens
        keys = config.sliding_window + TORCH_TILE_TOKENS + self.selected
        per_token = 4 * config.num_attention_heads * keys
        tile = min(tokens, TORCH_TILE_TOKENS, max(1, TORCH_TILE_BYTES // per_token))
        listed = self.selected if self.ratio == CSA_RATIO else 0
        rows = 4 * config.head_dim * (3 * self.entries + 2 * tile * listed)
        scores = 0
        if self.ratio == CSA_RATIO:
            per_token = 4 * config.index_n_heads * self.entries
            at_once = min(tokens, max(1, TORCH_TILE_BYTES // per_token))
            scores = 3 * at_once * per_token + 4 * config.index_head_dim * 3 * self.entries
        float_queries = 4 * self.queries // self.item
        attending = 4 * tile * 4 * config.num_attention_heads * keys + rows + 4 * float_queries
        return self.projections + self.queries + 8 * tokens * listed + max(attending, scores)

    @property
    def torch_experts(self) -> int:
        """float32 input, hidden rows and result, at worst of all tokens in one expert."""
        width, inner = self.config.hidden_size, self.config.moe_intermediate_size
        return self.tokens * 4 * (4 * width + 5 * inner + 2 * self.config.n_routed_experts)
