"""Attention where the fast kernels do not fit: small head widths, float32 rows, long lists."""

from torch import Tensor

from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.recording import Recording
from dsv4.ops.attention.inputs import AttentionInputs
from dsv4.ops.key_rows import row_code

# THREADS of attention_any_geometry.cu.
_THREADS = 128
# A block keeps a query and its sums in static shared memory.
_WIDEST_HEAD = 4096


def attention_any_geometry(
    recording: Recording, inputs: AttentionInputs, as_last: bool = False
) -> Tensor:
    """``sparse_attention`` by a plain kernel: a block per head and token, in float32. ``as_last``:
    every token sees what the last one sees.

    Raises ``ValueError`` for heads of more than 4096 values.
    """
    _, heads, width = inputs.q_THD.shape
    if width > _WIDEST_HEAD:
        raise ValueError(f"q_THD: found heads of {width}, expected at most {_WIDEST_HEAD}")
    keys = inputs.keys
    name = "attention_any_geometry"
    kernel = Kernel(f"attention/{name}", name, (("AS_LAST", 1),) if as_last else ())
    out_THD = recording.empty_like(inputs.q_THD)
    recording.launch(
        lambda tokens: Shape(kernel, (heads, tokens), _THREADS, settles=True),
        q=inputs.q_THD,
        positions=inputs.positions_T,
        sinks=inputs.sink_H,
        inv_freq=inputs.inv_freq,
        **inputs.cache_arguments,
        selected=inputs.selected_TK,
        out=out_THD,
        format=row_code(keys.ring),
        heads=heads,
        width=width,
        rope_width=keys.ring.rope_width,
        ring_slots=keys.ring.slots,
        entry_slots=inputs.entries,
        listed=inputs.listed,
        ratio=max(keys.ratio, 1),
        window=keys.window,
        softmax_scale=width**-0.5,
    )
    return out_THD
