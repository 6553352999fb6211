"""States of GPUs on disk: captured steps and any number of devices go on with them bit for bit."""

from pathlib import Path

import pytest
import torch

from dsv4 import Engine
from tests.decode.demo import GREEDY, PROMPTS, load

pytestmark = pytest.mark.gpu

IDS = (PROMPTS["recall_128"] * 4)[:700]
NO_STOP: frozenset[int] = frozenset()


def goes_on(source: Engine, target: Engine, path: Path) -> None:
    """Around a window, an entry and a chunk, with tokens taken back before and after."""
    for position in (127, 128, 511, 512, 513):
        source.reset()
        source.prefill(IDS[:position])
        source.decode(IDS[position:][:3])
        source.rewind(3)
        source.save_state(path)
        target.load_state(path)
        for engine in (source, target):
            engine.rewind(4)
        for token in IDS[position - 4 :][:12]:
            assert torch.equal(source.decode([token]).cpu(), target.decode([token]).cpu())


def test_captured_steps_go_on_with_a_state_of_eager_ones(
    eager: Engine, graph: Engine, tmp_path: Path
) -> None:
    goes_on(eager, graph, tmp_path / "state")
    goes_on(graph, eager, tmp_path / "state")


def test_a_generation_goes_on_behind_its_answer(graph: Engine, tmp_path: Path) -> None:
    """A stop leaves steps queued ahead, which must not be in the file."""
    run = graph.generate(IDS[:200], 20, GREEDY, NO_STOP)
    answer = [next(run) for _ in range(8)]
    run.close()
    graph.save_state(tmp_path / "state")
    position = graph.position
    whole = [*IDS[:200], *answer, *IDS[300:320]]
    expected = list(graph.generate(whole, 8, GREEDY, NO_STOP, reuse=True))
    graph.load_state(tmp_path / "state")
    assert graph.token_ids == whole[:position]
    assert list(graph.generate(whole, 8, GREEDY, NO_STOP, reuse=True)) == expected
    assert graph.last_run is not None
    assert graph.last_run.reused_tokens == position


def test_a_point_is_gone_back_to_from_behind_captured_steps(eager: Engine, graph: Engine) -> None:
    """The answer is longer than the rings of both compressors."""
    list(graph.generate(IDS[:200], 180, GREEDY, NO_STOP, reuse=True))
    following = [*IDS[:199], *IDS[300:330]]
    assert graph.reusable_tokens(following) == 199
    answer = list(graph.generate(following, 20, GREEDY, NO_STOP, reuse=True))
    eager.reset()
    eager.prefill(IDS[:200])
    eager.rewind(1)
    assert list(eager.generate(following, 20, GREEDY, NO_STOP, reuse=True)) == answer
    assert torch.equal(eager.decode([9]).cpu(), graph.decode([9]).cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("parallel", ["pipeline", "round-robin"])
def test_two_devices_go_on_with_the_state_of_one(
    parallel: str, eager: Engine, tmp_path: Path
) -> None:
    two = load(gpus=2, parallel=parallel)
    goes_on(eager, two, tmp_path / "state")
    goes_on(two, eager, tmp_path / "state")
