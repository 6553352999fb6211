"""What the report says of a layer in its one line."""

import math

from dsv4.validate.agreement import Agreement
from dsv4.validate.layer_walk import LayerResult
from dsv4.validate.layers import line


def row(value: str, worst_token: float) -> Agreement:
    under = None if worst_token >= 0.999 else 0
    return Agreement(f"layers.1.{value}", "SWA", worst_token, worst_token, 0, 0.0, under)


def test_nan_is_the_least_of_all_values() -> None:
    rows = [row("attn.kv", 0.5), row("attn.heads", math.nan), row("streams", 0.1)]
    found = line(LayerResult(1, "SWA", 8, 0.0, rows, [], []))
    assert "  0.10000000  attn.heads nan  under the threshold: attn.kv, attn.heads," in found
