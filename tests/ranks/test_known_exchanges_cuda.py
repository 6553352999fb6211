"""Words that all ranks know, between GPUs: a million of exchanges is the same test by
``python -m dsv4.validate.exchange``.
"""

import pytest
import torch

from dsv4.native.run_checks import run_checks
from dsv4.parallel.known_exchanges import KnownExchanges
from dsv4.validate.exchange import exchange
from tests.gpu_counts import gpu_counts
from tests.ranks.on_gpu import run_script

pytestmark = pytest.mark.gpu
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
GPUS = [torch.device("cuda", index) for index in range(8)]
COUNTS = gpu_counts(2, 4, 8)
WIDTH = 4096
# In seconds.
EXCHANGES = 50_000


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_on_one_stream_find_their_sums_right(ranks: int) -> None:
    for tokens, width in ((1, WIDTH), (8, 200)):
        known = KnownExchanges(GPUS[:1] * ranks, width, tokens)
        for _ in range(3):
            known.run()
        assert known.wrong() == [0] * ranks


def test_a_word_that_changed_on_its_way_is_counted_where_it_arrived() -> None:
    known = KnownExchanges(GPUS[:1] * 2, WIDTH)
    known.run_rank(0, 0, 2)
    known.run_rank(1, 0, 2)
    torch.cuda.synchronize()
    known.peers[1].inbox[17] ^= 1 << 22
    known.run_rank(0, 2, 3)
    known.run_rank(1, 2, 3)
    assert known.wrong() == [0, 1]


@pytest.mark.parametrize("gpus", COUNTS)
@pytest.mark.parametrize(("width", "tokens"), [(WIDTH, 1), (7168, 8)])
def test_gpus_find_their_sums_right_beside_copies(width: int, tokens: int, gpus: int) -> None:
    found = exchange(GPUS[:gpus], EXCHANGES, width, tokens, copies=True)
    assert found["wrong_sums"] == [0] * gpus
    assert found["exchanges"] >= EXCHANGES
    assert all(rate > 0 for rate in found["copies_gb_per_s"])


@pytest.mark.parametrize("gpus", COUNTS)
def test_the_check_of_gpus_passes_in_a_child(gpus: int) -> None:
    verdict = run_checks(f"dsv4.parallel.exchange_check:on_{gpus}_gpus", GPUS[0], 120)
    assert verdict.complaint is None


@TWO_GPUS
def test_a_rank_that_stays_away_is_named() -> None:
    script = """
import torch
from dsv4.parallel.known_exchanges import KnownExchanges
known = KnownExchanges([torch.device("cuda", index) for index in range(2)], 4096)
known.run()
known.run_rank(0)
known.wrong()
"""
    result = run_script(script)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last == "RuntimeError: CUDA error: words of rank 1 did not come (exchange 0 of step 2)"
