"""Which cases of sampled tests are run."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


def item(name: str, step: int | None) -> Any:
    mark = None if step is None else pytest.mark.sampled(step).mark
    return SimpleNamespace(nodeid=f"tests/test_x.py::{name}", get_closest_marker=lambda _: mark)


def test_the_first_case_and_every_step_th_behind_it() -> None:
    many = [item(f"test_many[{case}]", 3) for case in ("a", "b-c", "d[0]", "e", "f")]
    others = [item("test_alone", 2), *(item(f"test_all[{case}]", None) for case in range(3))]
    in_sample = conftest._in_sample()
    kept = [one.nodeid.partition("::")[2] for one in (*many, *others) if in_sample(one)]
    assert kept == ["test_many[a]", "test_many[e]", "test_alone"] + [
        f"test_all[{case}]" for case in range(3)
    ]


def test_a_case_that_is_asked_for_by_its_name_is_run() -> None:
    assert conftest._in_sample()(item("test_many[f]", 3))
