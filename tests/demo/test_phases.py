"""What the phases of training ask for over their time: batches and rates."""

import pytest

from dsv4.demo.training.train import rate_at
from dsv4.demo.training.trainer import LONG, PHASES, SENT_LEAST, SHORT, shape_at

CONFIRM = PHASES["confirm"]


def test_sent_messages_become_fewer_and_near_ones_end() -> None:
    shapes = [shape_at(CONFIRM, tenth / 10, long=False, rows=8) for tenth in range(13)]
    shares = [shape.sent_share for shape in shapes]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(CONFIRM.sent_share)
    assert shares[-1] == shares[10] == SENT_LEAST
    near = [shape.near_share for shape in shapes]
    assert near[0] == pytest.approx(CONFIRM.near_share)
    assert near == sorted(near, reverse=True)
    assert near[4] > 0 == near[5] == near[-1]
    assert {(shape.rows, shape.length) for shape in shapes} == {(8, SHORT.length)}


@pytest.mark.parametrize("phase", [name for name in PHASES if name != "confirm"])
def test_other_phases_have_the_mixture_alone(phase: str) -> None:
    assert shape_at(PHASES[phase], 0.5, long=False, rows=SHORT.rows) == SHORT


@pytest.mark.parametrize("phase", PHASES)
def test_long_batches_shrink_with_the_short_ones(phase: str) -> None:
    assert shape_at(PHASES[phase], 0.5, long=True, rows=SHORT.rows) == LONG
    assert shape_at(PHASES[phase], 0.5, long=True, rows=SHORT.rows // 2).rows == LONG.rows // 2
    assert shape_at(PHASES[phase], 0.5, long=True, rows=1).rows == 1


@pytest.mark.parametrize("phase", PHASES)
def test_rates_rise_for_the_warm_up_and_fall_to_the_last(phase: str) -> None:
    asked = PHASES[phase]
    assert rate_at(asked, 0.0, 0) == pytest.approx(asked.peak_rate / asked.warm_up)
    assert rate_at(asked, 0.0, asked.warm_up) == pytest.approx(asked.peak_rate)
    assert rate_at(asked, 1.5, 10**4) == pytest.approx(asked.final_rate)
