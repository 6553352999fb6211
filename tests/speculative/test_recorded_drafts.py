"""What is recorded of draft modules for published geometries, on weights without memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.bench.drafts import drafted_geometry
from dsv4.checkpoint import Geometry, geometry_config
from dsv4.checkpoint.layouts import format_in
from dsv4.config import ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Call, Item, Launch
from dsv4.launch.target import Target
from dsv4.ops.tables import CUDA_TABLE
from dsv4.parallel.placement import Placement
from dsv4.speculative.planned import planned_along
from dsv4.step.parts import Part
from dsv4.step.planned import PlannedSteps
from dsv4.step.recorded import RecordedStep
from dsv4.weights.parameters import MtpKind, parameters

GPUS = [torch.device("cuda", index) for index in range(2)]
ENGINE = EngineConfig(prefill_chunk=512, max_context=2048)
STAGES: dict[MtpKind, int] = {"classic": 1, "dspark": 3}
PUBLISHED: list[tuple[Geometry, MtpKind]] = [
    ("v4-flash", "classic"),
    ("v4-flash", "dspark"),
    ("v4-pro", "dspark"),
]


def planned(name: Geometry, kind: MtpKind, gpus: int = 1, drafted: bool = True) -> PlannedSteps:
    config = ModelConfig.from_dict(drafted_geometry(geometry_config(name, 8), kind))
    stored = [
        (parameter, format_in("nvfp4-experts", parameter))
        for parameter in parameters(config, kind if drafted else None).values()
    ]
    placement = Placement.pipeline([1] * 8, GPUS[:gpus])
    targets = {device: Target(device, "sm_90a", 132) for device in GPUS[:gpus]}
    along = None
    if drafted:
        along = planned_along(config, ENGINE, CUDA_TABLE, (kind, STAGES[kind]))
    return PlannedSteps.of(config, ENGINE, stored, CUDA_TABLE, targets, placement, along)


def kernels(step: RecordedStep, kind: str) -> list[str]:
    parts = [part for part in step.parts if isinstance(part, Part) and part.kind == kind]
    return [name for part in parts for name in step.launches(part)]


@pytest.mark.parametrize(("name", "kind"), PUBLISHED)
def test_published_modules_take_the_fast_kernels(name: Geometry, kind: MtpKind) -> None:
    found = planned(name, kind)
    steps = (*found.steps, *found.apart)
    assert [step.tokens for step in steps] == [1, 8, 512, 5 if kind == "dspark" else 1, 139]
    assert [name for step in steps for name in step.unusual_kernels()] == []


@pytest.mark.parametrize("kind", STAGES)
def test_every_step_of_the_model_runs_the_module_s_rows(kind: MtpKind) -> None:
    found = planned("v4-flash", kind)
    one, eight, prompt = (kernels(step, "draft") for step in found.steps[:3])
    stores = STAGES[kind]
    assert one.count("query_rope") == eight.count("query_rope") == stores
    # A prompt leaves its last streams, and what reads them is a step apart.
    assert prompt == ["(torch or CuTe DSL)"]
    assert kernels(found.apart[0], "draft").count("kv_write") == stores


@pytest.mark.parametrize("kind", STAGES)
def test_every_decode_step_chooses_what_stays(kind: MtpKind) -> None:
    one, eight, prompt = planned("v4-flash", kind).steps[:3]
    assert kernels(one, "sample") == ["sample_token", "store_token", "settle_block"]
    assert kernels(eight, "sample") == ["sample_token", "judge_drafts", "settle_block"]
    assert kernels(prompt, "sample") == []


def test_a_block_is_run_once_and_its_drafts_follow_each_other() -> None:
    draft = planned("v4-flash", "dspark").steps[3]
    counts = Counter(kernels(draft, "draft"))
    assert counts["attention_decode"] == counts["moe_decode"] == counts["prepare_attention"] == 3
    assert counts["markov_row"] == counts["markov_add"] == counts["sample_token"] == 5
    assert counts["enter_drafts"] == counts["begin_rows"] == 1


def test_drafts_of_classic_mtp_are_a_row_each() -> None:
    draft = planned("v4-flash", "classic").steps[3]
    counts = Counter(kernels(draft, "draft"))
    assert counts["attention_decode"] == counts["sample_token"] == counts["enter_drafts"] == 7
    assert counts["recall_streams"] == 1


@pytest.mark.parametrize("kind", STAGES)
def test_devices_share_the_head_of_drafts(kind: MtpKind) -> None:
    """Once for a block of DSpark; each draft of classic MTP has a row of its own."""
    draft = planned("v4-flash", kind, gpus=2).steps[3]
    heads = 1 if kind == "dspark" else 7
    others, last = (draft.recordings[device] for device in GPUS[:2])
    launched = [item.signature.kernel for item in others.items if isinstance(item, Launch)]
    assert launched == ["receive_rows", "decode_linear", "send_rows"] * heads
    moved = [item.signature.kernel for item in last.items if isinstance(item, Launch)]
    moved = [kernel for kernel in moved if kernel.endswith("_rows") and kernel in launched]
    assert moved == ["send_rows", "receive_rows"] * heads
    assert draft.channel_uses == heads


@pytest.mark.parametrize("kind", STAGES)
def test_the_model_s_part_of_a_step_is_that_without_a_module(kind: MtpKind) -> None:
    """On two devices: the module changes nothing but what is behind the model."""
    with_module = planned("v4-flash", kind, gpus=2).steps[:3]
    without = planned("v4-flash", kind, gpus=2, drafted=False).steps
    for step, plain in zip(with_module, without, strict=True):
        parts = [part for part in step.parts if not isinstance(part, Part) or part.kind != "draft"]
        others = list(plain.parts)
        names = [part.name for part in parts if part.name != "sample"]
        assert names == [part.name for part in others if part.name != "sample"]
        for part, other in zip(parts, others, strict=False):
            if isinstance(part, Part) and isinstance(other, Part) and part.kind != "sample":
                # With drafts the host hands tokens on.
                expected = [name for name in plain.launches(other) if name != "take_tokens"]
                assert step.launches(part) == expected


def test_a_longer_context_changes_no_recording_of_the_module() -> None:
    """Its keys are those of a window."""
    config = ModelConfig.from_dict(drafted_geometry(geometry_config("v4-flash", 8), "dspark"))
    sizes = []
    for context in (2048, 65536):
        engine = replace(ENGINE, max_context=context)
        stored = [
            (parameter, format_in("nvfp4-experts", parameter))
            for parameter in parameters(config, "dspark").values()
        ]
        along = planned_along(config, engine, CUDA_TABLE, ("dspark", 3))
        targets = {GPUS[0]: Target(GPUS[0], "sm_90a", 132)}
        placement = Placement.pipeline([1] * 8, GPUS[:1])
        found = PlannedSteps.of(config, engine, stored, CUDA_TABLE, targets, placement, along)
        sizes.append(found.steps[3].workspace_bytes())
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("name", "kind"), PUBLISHED)
def test_attention_reads_no_row_early_that_the_same_step_remembers(
    name: Geometry, kind: MtpKind
) -> None:
    """Behind the last item that settles what is in front of it, only the layer's own launch writes
    the ring: attention leaves out what that one writes until it has ended.
    """
    checked = 0
    for step in planned(name, kind).steps:
        for recording in step.recordings.values():
            behind: list[Item] = []
            for item in recording.items:
                if isinstance(item, Launch) and item.signature.kernel == "attention_decode":
                    ring = item.arguments["ring_data"]
                    assert isinstance(ring, Tensor)
                    assert writers(behind, ring) == ["prepare_attention"]
                    checked += 1
                behind = [item] if isinstance(item, Call) or item.settles else [*behind, item]
    assert checked > 8


def writers(items: Sequence[Item], buffer: Tensor) -> list[str]:
    """The kernels among these that may write a buffer."""
    return [
        item.signature.kernel
        for item in items
        if isinstance(item, Launch) and storage_key(buffer) in item.written_storages
    ]
