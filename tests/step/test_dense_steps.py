"""What a dense step leaves out: whatever serves the indexer's choice, which would be everything."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from dsv4.checkpoint import Layout
from dsv4.config import CSA_RATIO, layer_kinds
from dsv4.launch.items import Launch
from dsv4.ops.tables import CUDA_TABLE, swap_ops
from dsv4.step.recorded import RecordedStep
from tests.step.planned_model import PlannedModel, compute_parts, demo, geometry, runs

PLANNED = {
    "flash": lambda: geometry("v4-flash", layers=4),
    "pro": lambda: geometry("v4-pro", layers=4),
    "demo": lambda: demo(1),
}
SELECTION = {"index_scores", "index_scores_any_geometry", "top_k_tokens"}


@pytest.fixture(scope="module", params=PLANNED)
def planned(request: pytest.FixtureRequest) -> PlannedModel:
    return PLANNED[request.param]()


def differing(step: RecordedStep) -> list[tuple[str, Launch]]:
    """The launches that a dense step launches otherwise, each with the kind of its layer's part."""
    return [
        (part.name, item)
        for part in compute_parts(step)
        for item in step.recordings[part.device].items[part.start : part.stop]
        if isinstance(item, Launch) and item.differs_if_dense
    ]


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_a_dense_step_does_without_the_indexers_choice(planned: PlannedModel, tokens: int) -> None:
    step = planned.record(tokens)
    kinds = list(layer_kinds(planned.config))
    found = differing(step)
    layers = [layer for layer, kind in enumerate(kinds) if kind == "CSA"]
    assert {name for name, _ in found} == {
        f"layer {layer} {part}" for layer in layers for part in ("projections", "attention")
    }
    for _, launch in found:
        name = launch.shape.kernel.function
        dense: Any = launch.dense_shape
        if name in SELECTION:
            assert dense is None
        elif name == "attention_decode":
            listed = min(planned.config.index_topk, 8192 // CSA_RATIO)
            assert dict(dense.kernel.defines)["LISTED"] == 0
            assert dense.numbers == {"entries": listed, "listed": 0}
            assert (dense.blocks, dense.cluster) == (launch.shape.blocks, launch.shape.cluster)
        elif name == "decode_linear":
            assert launch.shape.numbers["later_tiles"] > 0
            assert dense == replace(launch.shape, numbers={"later_tiles": 0})
        else:
            assert name == "prepare_attention"
            assert dense.kernel == launch.shape.kernel
            assert dense.grid < launch.shape.grid
    counts = [launch.shape.kernel.function for _, launch in found]
    assert {name: counts.count(name) for name in counts} == dict.fromkeys(counts, len(layers))
    assert len(counts) == 5 * len(layers)


def test_names_of_what_is_launched_leave_out_what_a_dense_step_does(planned: PlannedModel) -> None:
    step = planned.record(1)
    for part in compute_parts(step):
        items = step.recordings[part.device].items
        for dense in (False, True):
            found = [index for index, _ in step.launched(part, 1, dense)]
            assert found == [at for at in range(part.start, part.stop) if runs(items[at], dense)]


def test_steps_are_dense_as_long_as_every_entry_is_chosen(planned: PlannedModel) -> None:
    """The last token of a step sees the most entries: all that its sequence has completed."""
    step = planned.record(2)
    topk = planned.config.index_topk
    dense = [end for end in range(2, 8192) if step.is_dense(end)]
    assert dense == [end for end in range(2, 8192) if end // CSA_RATIO <= topk]
    assert not step.is_dense(None)
    assert step.ends(8192) == [dense[-1], 8192]
    assert step.ends(dense[-1]) == [dense[-1]]


@pytest.mark.parametrize("op", ["index_select", "sparse_attention", "linear_rows"])
def test_swapped_ops_get_all_that_they_read(op: str) -> None:
    swapped = geometry("v4-flash", layers=4).on(swap_ops(CUDA_TABLE, {op: "torch"})).record(1)
    assert differing(swapped) == []


def test_traced_steps_compute_the_choice(planned: PlannedModel) -> None:
    traced = planned.record_traced(1)
    assert differing(traced) == []
    assert not traced.is_dense(2)
    assert traced.ends(8192) == [8192]


@pytest.mark.parametrize("layout", get_args(Layout))
def test_steps_of_prefill_are_none(layout: Layout) -> None:
    assert geometry("v4-flash", layout, layers=4).record(512).dense_until == 0
