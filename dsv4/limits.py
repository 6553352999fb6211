"""Limits of decoding that caches, ops and steps share."""

MAX_DECODE_TOKENS = 8
# A step that verifies has the token before the drafts as well.
MAX_DRAFTS = MAX_DECODE_TOKENS - 1
# Tokens of the longest chunk of a prompt: no activation of V4-Pro exceeds 2^31 bytes then. Grids
# have a block for every token along y, at most 65,535.
MAX_PREFILL_CHUNK = 16384
# Alternatives that a generation reports for every token.
MAX_LOGPROBS = 1000
# Steps in the queue, with the one that the host waits for: enough to hide the host.
STEPS_AHEAD = 4
# Tokens that caches can take back: the longest draft and the steps that a stop leaves queued.
MAX_TAKEN_BACK = MAX_DECODE_TOKENS + STEPS_AHEAD - 1
