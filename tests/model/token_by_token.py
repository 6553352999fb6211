"""An op table whose arithmetic does not depend on how many tokens a step has, for bitwise tests of
the state.

Matrix products of different heights round differently, and one different last bit moves a value
across a rounding boundary of bfloat16 or fp8. With one product per token nothing is left but what a
step does to the caches and the position, which is then compared bit by bit. What writes state
(``kv_write``, ``compress``) is the normal code.
"""

from dsv4.ops import TORCH, Ops
from dsv4.ops.row_by_row import each_token, row_by_row
from tests.model.parts import Parts, with_parts


def one_token_at_a_time(ops: Ops = TORCH) -> Ops:
    """``ops`` with every stateless op called once per token."""
    normal = Parts()
    return with_parts(
        row_by_row(ops),
        query_rope=each_token(normal.query_rope, 0, 1),
        index_query=each_token(normal.index_query, 0, 1),
    )
