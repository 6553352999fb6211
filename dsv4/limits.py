"""Limits of decoding that caches, ops and steps share."""

MAX_DECODE_TOKENS = 8
# Steps that may be queued, the one whose token the host waits for included: enough to hide the
# host.
STEPS_AHEAD = 4
# How far caches remember: the longest draft, behind what a stop leaves queued in vain.
MAX_TAKEN_BACK = MAX_DECODE_TOKENS + STEPS_AHEAD - 1
