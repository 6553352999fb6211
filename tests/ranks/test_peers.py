"""What ranks share: where every word lies, as planned and as connected, and what a fault says."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from dsv4 import ModelConfig
from dsv4.parallel.rank_state import connect
from dsv4.parallel.sharding import cut_of
from dsv4.peers import (
    LOGITS_EXCHANGE,
    MOST_EXCHANGES,
    STEP_NUMBERS,
    InboxLayout,
    Peers,
    naming_missing_words,
)
from dsv4.weights.parameters import parameters
from tests.model.tiny import CPU, small_config

LAYOUTS = [InboxLayout(2, 64, 89), InboxLayout(4, 8, 1000), InboxLayout(8, 7168, 129280)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_inbox_is_full_of_places_that_do_not_overlap(layout: InboxLayout) -> None:
    places = [*map(layout.slot, (0, 1, LOGITS_EXCHANGE)), layout.rows_slot]
    size = layout.ranks * layout.rank_words
    assert sorted(places) == list(range(0, layout.words, size))
    assert layout.rank_words == 8 * max(layout.width, layout.head_rows)
    assert layout.nbytes == 8 * layout.words


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("vocabulary", [128, 129, 200, 1000])
def test_the_head_of_every_rank_has_room(vocabulary: int, ranks: int) -> None:
    config = ModelConfig.from_dict(small_config(vocab_size=vocabulary))
    head = parameters(config)["head.weight"]
    cuts = [cut_of(head, ranks, rank) for rank in range(ranks)]
    rows = [cut.stop - cut.first for cut in cuts if cut is not None]
    assert InboxLayout.of(config, ranks).head_rows == max(rows)


def test_the_tags_of_32_bits_tell_all_exchanges_of_so_many_steps_apart() -> None:
    assert STEP_NUMBERS * MOST_EXCHANGES == 1 << 32


def test_planned_memory_is_that_of_connected_ranks() -> None:
    config = ModelConfig.from_dict(small_config())
    layout = InboxLayout.of(config, 2)
    shapes = (layout.width, layout.vocabulary, layout.listed)
    assert shapes == (config.hidden_size, config.vocab_size, config.index_topk)
    for rank, connected in enumerate(connect(layout, [CPU] * 2, 24)):
        planned = Peers.planned(rank, layout, 24)
        assert planned.rank == connected.rank == rank
        for name in (field.name for field in fields(Peers)):
            found, expected = vars(planned)[name], vars(connected)[name]
            if isinstance(expected, Tensor):
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
                assert found.is_meta


def test_the_words_of_a_fault_are_those_that_are_shared() -> None:
    fault_4 = connect(LAYOUTS[0], [CPU] * 2, 1)[0].fault_4
    fault_4.copy_(torch.tensor([1, 7, 3, 9]))
    expected = r"^CUDA error: words of rank 3 did not come \(exchange 7 of step 9\)$"
    with pytest.raises(RuntimeError, match=expected) as caught, naming_missing_words(fault_4):
        raise torch.AcceleratorError("trapped")
    assert str(caught.value.__cause__) == "trapped"


def test_only_faults_of_a_device_are_looked_up() -> None:
    fault_4 = torch.tensor([1, 7, 3, 9])
    with pytest.raises(RuntimeError, match=r"^another$"), naming_missing_words(fault_4):
        raise RuntimeError("another")
