"""``--profile`` shows drafts apart from the steps that verify them."""

from dsv4 import SamplingParams
from dsv4.config import layer_kinds
from dsv4.measure.op_profile import OpProfile
from tests.model.tiny import random_ids
from tests.speculative.models import drafted_engine


def test_ops_of_drafts_have_a_column_of_their_own() -> None:
    engine = drafted_engine("classic")
    profile = OpProfile(engine.state.devices, layer_kinds(engine.config))
    engine.steps.observer = profile
    list(engine.generate(random_ids(9), 6, SamplingParams(temperature=0), frozenset()))
    calls = {(kind, name): count for (_, kind, name), count in profile.calls.items()}
    assert engine.last_run is not None
    assert engine.last_run.drafts is not None
    drafted = engine.last_run.drafts.drafted[0]
    # A draft has one block and one choice; a layer of the main model has its MoE in every step.
    assert calls["draft", "moe"] == drafted
    assert calls["CSA", "moe"] == 2 * (1 + engine.last_run.drafts.steps)
    assert "draft" in profile.table().splitlines()[0]
