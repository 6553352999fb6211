"""How long the caches of a run configuration are."""

import pytest

from dsv4 import EngineConfig, ModelConfig
from dsv4.caches.allocation import ring_slots
from dsv4.checkpoint import tiny_config
from dsv4.limits import MAX_DECODE_TOKENS

CONFIG = ModelConfig.from_dict(tiny_config())


@pytest.mark.parametrize(("chunk", "longest"), [(1, MAX_DECODE_TOKENS), (9, 9), (None, 512)])
def test_a_window_ring_has_room_for_the_longest_step(chunk: int | None, longest: int) -> None:
    """Of a prompt, or of tokens with their drafts; beside the window and what is undone."""
    slots = ring_slots(CONFIG, EngineConfig(prefill_chunk=chunk))
    assert slots == CONFIG.sliding_window + longest + MAX_DECODE_TOKENS
