"""A small model on disk and the tokens that the tests of layers feed it."""

from dsv4 import EngineConfig
from dsv4.checkpoint import tiny_config

TOKENS = list(range(3, 24))
CONFIG = EngineConfig(device="cpu", max_context=len(TOKENS), prefill_chunk=8)
SMALL = tiny_config(hc_sinkhorn_iters=3, n_routed_experts=16)
