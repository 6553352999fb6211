"""Whole models recorded with native products for GPUs that are not here."""

from collections import Counter

import pytest

from dsv4.checkpoint import Layout
from dsv4.engine_config import ActivationMode
from dsv4.launch.items import Call
from dsv4.ops.linear import prefill_scaled, prefill_w16
from dsv4.ops.tables import CUDA_TABLE, NATIVE_TABLES
from tests.step.planned_model import GPUS, PlannedModel, compute_parts, geometry

LAYERS = 4


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_w16, "load_gemm", lambda config, architecture: None)
    monkeypatch.setattr(prefill_scaled, "load_gemm", lambda config, architecture: None)


def planned(mode: ActivationMode, layout: Layout, architecture: str = "sm_100a") -> PlannedModel:
    model = geometry("v4-flash", layout, LAYERS, table=NATIVE_TABLES[mode])
    return model.for_gpus(architecture, 148)


def native_calls(model: PlannedModel, tokens: int) -> Counter[tuple[str, str]]:
    """Calls that are no plain functions, by the kind of their part and the type of the function."""
    step = model.record(tokens)
    found: Counter[tuple[str, str]] = Counter()
    for part in compute_parts(step):
        for item in step.recordings[part.device].items[part.start : part.stop]:
            if isinstance(item, Call):
                found[part.kind, type(item.function).__name__] += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "layout"),
    [("bf16", "nvfp4-experts"), ("fp8", "native"), ("nvfp4", "nvfp4-experts")],
)
def test_prefill_steps_have_native_products_and_decode_steps_none(
    mode: ActivationMode, layout: Layout
) -> None:
    model = planned(mode, layout)
    found = native_calls(model, 512)
    kinds = Counter(kind for kind, _ in found.elements())
    # o_a and o_b in every layer; w1 with w3 and w2 of routed and of shared experts.
    assert kinds["attention"] >= 2 * LAYERS
    assert kinds["experts"] >= 4 * LAYERS
    assert kinds["projections"] >= 3 * LAYERS
    assert not native_calls(model, 8)


def test_other_gpus_take_the_portable_launches() -> None:
    model = planned("bf16", "nvfp4-experts", "sm_90a")
    portable = model.on(CUDA_TABLE)
    for tokens in (8, 512):
        steps = [chosen.record(tokens) for chosen in (model, portable)]
        names = [
            [name for part in compute_parts(step) for name in step.launches(part)] for step in steps
        ]
        assert names[0] == names[1]
    assert set(steps[0].recordings) == {GPUS[0]}
