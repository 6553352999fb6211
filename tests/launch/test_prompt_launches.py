"""Launches whose shape goes with the number of tokens, with a driver that only writes them down."""

from functools import cache

import pytest
import torch

from dsv4.launch import prepared
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.program import Program
from dsv4.launch.recording import Recording
from tests.launch.fake_driver import Driver
from tests.launch.norms import NORM, TARGET, normalise

SORT = Kernel("moe/moe_sort", "moe_sort")


def test_shorter_chunks_take_their_own_shapes_and_the_longest_its_own_again(
    driver: Driver,
) -> None:
    """The second launch has nothing to do below 40 tokens."""
    recording = Recording(TARGET, 64)
    ids = torch.zeros(64, dtype=torch.int64)
    sizes = {"slots": (64,), "tiles": (8, 4), "tile_count": (1,)}
    outputs = {name: recording.empty(size, torch.int32) for name, size in sizes.items()}

    def sort(first: int) -> None:
        def shape(tokens: int) -> Shape | None:
            if tokens <= first:
                return None
            return Shape(SORT, 1 + tokens // 16, 32, 4 * tokens, numbers={"count": tokens - first})

        recording.launch(shape, ids=ids, **outputs, experts=8, tile=128)

    sort(0)
    sort(40)
    running = Program(recording)
    for tokens in (64, 30, 50, 64):
        running.run(tokens, dense=tokens == 50)
    found = [
        (launched.grid[0], launched.shared_bytes, launched.words[4]) for launched in driver.launches
    ]
    whole = [(5, 256, 64), (5, 256, 24)]
    assert found == [*whole, (2, 120, 30), (4, 200, 50), (4, 200, 10), *whole]


def test_the_first_step_may_be_of_one_token_on_the_default_stream(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
    recording = Recording(TARGET, 64)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    y = recording.empty((64, 64), torch.bfloat16)
    normalise(recording, x, y, lambda tokens: Shape(NORM, tokens, 32))
    Program(recording).run(1)
    assert [launched.grid[0] for launched in driver.launches] == [1]


def test_the_longest_chunk_may_have_nothing_to_do(driver: Driver) -> None:
    recording = Recording(TARGET, 64)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    y = recording.empty((64, 64), torch.bfloat16)
    normalise(recording, x, y, lambda tokens: Shape(NORM, tokens, 32) if tokens <= 40 else None)
    running = Program(recording)
    for tokens in (64, 40, 64):
        running.run(tokens)
    assert [launched.grid[0] for launched in driver.launches] == [40]


def test_other_chunks_may_take_another_kernel_in_other_blocks(driver: Driver) -> None:
    recording = Recording(TARGET, 64)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    few = Shape(Kernel(NORM.source, NORM.function, (("FEW", 1),)), 1, 64, cluster=1)
    some = Shape(NORM, 2, 96, cluster=2)

    def shape(tokens: int) -> Shape:
        return few if tokens < 20 else some

    normalise(recording, x, recording.empty((64, 64), torch.bfloat16), shape)
    running = Program(recording)
    for tokens in (64, 10, 30, 10):
        running.run(tokens)
    assert [
        (launched.kernel, launched.threads, launched.attributes) for launched in driver.launches
    ] == [(taken.kernel, taken.threads, taken.cluster) for taken in (some, few, some, few)]


def test_shared_memory_is_asked_for_once_for_each_kernel_and_more_of_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Kernel, int]] = []
    monkeypatch.setattr(
        prepared, "allow_shared_memory", lambda kernel, _, nbytes: asked.append((kernel, nbytes))
    )
    few = Kernel(NORM.source, NORM.function, (("FEW", 1),))
    shapes = {1: (few, 20_000), 2: (few, 30_000), 3: (NORM, 20_000), 4: (NORM, 1_000), 64: (few, 0)}
    recording = Recording(TARGET, 64)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)

    def shape(tokens: int) -> Shape:
        kernel, nbytes = shapes[tokens]
        return Shape(kernel, 1, 32, nbytes)

    normalise(recording, x, recording.empty((64, 64), torch.bfloat16), shape)
    running = Program(recording)
    for tokens in (1, 2, 1, 2, 4, 3, 4, 2, 3):
        running.run(tokens)
    assert asked == [shapes[tokens] for tokens in (1, 2, 3, 2, 3)]


def test_launches_that_are_alike_change_together(driver: Driver) -> None:
    """Each with its own arguments; one that may not start early has a configuration of its own."""
    recording = Recording(TARGET, 64)
    rows = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3)]
    y = recording.empty((64, 64), torch.bfloat16)
    asked: list[int] = []

    def shape(tokens: int) -> Shape:
        asked.append(tokens)
        return Shape(NORM, tokens, 32, numbers={"width": tokens})

    for x in rows:
        recording.launch(shape, x=x, weight=None, y=y, eps=1e-6)
    running = Program(recording)
    asked.clear()
    for tokens in (64, 30, 30):
        running.run(tokens)
    assert asked == [64, 64, 30, 30]
    found = [
        (launched.grid[0], launched.words[0], launched.words[3]) for launched in driver.launches
    ]
    assert found == [(n, x.data_ptr(), n) for n in (64, 30, 30) for x in rows]
    assert [launched.overlaps for launched in driver.launches] == 3 * [0, 1, 1]


@pytest.mark.parametrize(
    ("of", "what"), [(prepared, "allow_shared_memory"), (prepared.Words, "pack")]
)
@pytest.mark.parametrize("then", [64, 30])
def test_a_change_that_is_interrupted_leaves_no_launch_of_two_lengths(
    then: int, of: object, what: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = Kernel(NORM.source, NORM.function, (("FEW", 1),))
    recording = Recording(TARGET, 64)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)

    # As launches that are alike have their shapes: the same object again for a length.
    @cache
    def shape(tokens: int) -> Shape:
        kernel = few if tokens < 64 else NORM
        return Shape(kernel, tokens, 32, 20_000 + tokens, numbers={"width": tokens})

    y = recording.empty((64, 64), torch.bfloat16)
    recording.launch(shape, x=x, weight=None, y=y, eps=1e-6)
    running = Program(recording)
    running.run(64)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(of, what, interrupt)
        with pytest.raises(KeyboardInterrupt):
            running.run(30)
    running.run(then)
    found = [(one.kernel, one.grid[0], one.shared_bytes, one.words[3]) for one in driver.launches]
    assert found == [(NORM, 64, 20_064, 64), (shape(then).kernel, then, 20_000 + then, then)]
