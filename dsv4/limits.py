"""Limits of decoding that caches, ops and steps share."""

MAX_DECODE_TOKENS = 8
# Alternatives that a generation reports for every token.
MAX_LOGPROBS = 1000
# Steps in the queue, with the one that the host waits for: enough to hide the host.
STEPS_AHEAD = 4
# Tokens that caches can take back: the longest draft and the steps that a stop leaves queued.
MAX_TAKEN_BACK = MAX_DECODE_TOKENS + STEPS_AHEAD - 1
