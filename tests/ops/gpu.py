"""What every GPU op test needs: poisoned memory, guarded outputs, replay of a captured call against
the eager one.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def poison(nbytes: int = 256 << 20) -> None:
    """Fills what the caching allocator will hand out next with NaN bytes (0xFF), so that unwritten
    outputs show.
    """
    blocks = [torch.full((nbytes // 4,), -1, dtype=torch.int8, device="cuda") for _ in range(4)]
    small = [
        torch.full((1 << exponent,), -1, dtype=torch.int8, device="cuda")
        for exponent in range(9, 21)
    ]
    del blocks, small


def assert_replay_is_eager(
    call: Callable[[], Sequence[Tensor] | Tensor], state: Sequence[Tensor] = ()
) -> None:
    """Captures ``call`` in a CUDA graph; its replay must give bit for bit what the eager call gave.

    ``state``: tensors the call changes in place; they are set back before the replay and compared
    after it. Also replays twice more, because kernels whose counters are not reset go wrong only
    then.
    """
    before = [tensor.clone() for tensor in state]
    call()  # first-use compilation and counter allocation happen outside the capture
    _restore(state, before)
    eager = [tensor.clone() for tensor in _tensors(call())]
    after = [tensor.clone() for tensor in state]
    _restore(state, before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _tensors(call())
    for _ in range(3):
        _restore(state, before)
        for tensor in captured:
            tensor.view(torch.uint8).fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        for found, expected in zip([*captured, *state], [*eager, *after], strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (
                "replay differs from eager"
            )


def assert_no_synchronisation(call: Callable[[], object]) -> None:
    """Runs ``call`` with torch raising on every implicit synchronisation. Run it once before to
    compile.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def guarded(tensor: Tensor, guard_bytes: int = 1024) -> tuple[Tensor, Callable[[], None]]:
    """A copy of ``tensor`` between two guard bands, and a check that nothing wrote into them."""
    nbytes = tensor.numel() * tensor.element_size()
    room = torch.full((nbytes + 2 * guard_bytes,), 0xA5, dtype=torch.uint8, device=tensor.device)
    copy = room[guard_bytes : guard_bytes + nbytes].view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)

    def check() -> None:
        assert bool((room[:guard_bytes] == 0xA5).all()), "wrote before the buffer"
        assert bool((room[guard_bytes + nbytes :] == 0xA5).all()), "wrote after the buffer"

    return copy, check


def relative_error(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖ in float64; NaN anywhere gives NaN and fails every comparison."""
    found = found.double()
    exact = exact.double()
    return float((found - exact).norm() / exact.norm().clamp(min=1e-300))


def _tensors(result: Sequence[Tensor] | Tensor | None) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def _restore(state: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
