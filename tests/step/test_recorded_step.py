"""A whole model recorded without a GPU: its parts, what they launch, and where hand-offs come."""

from dataclasses import replace

import pytest
import torch

from dsv4.checkpoint import Geometry, Layout
from dsv4.config import layer_kinds
from dsv4.engine_config import EngineConfig
from dsv4.launch.buffers import storage_key
from dsv4.launch.items import Call, Item, Launch
from dsv4.ops.linear.row_list import packed_rows
from dsv4.ops.tables import CUTEDSL_TABLE
from dsv4.ops.trees import tensors_in
from dsv4.step.parts import AnyPart, Part, Transfer
from dsv4.step.recorded import RecordedStep
from tests.step.planned_model import PlannedModel, compute_parts, demo, geometry

PLANNED = {
    "flash, 1 GPU": lambda: geometry("v4-flash"),
    "flash, 2 GPUs": lambda: geometry("v4-flash", gpus=2),
    "flash, 8 GPUs": lambda: geometry("v4-flash", gpus=8),
    "flash, round robin": lambda: geometry("v4-flash", layers=9, gpus=2, round_robin=True),
    "pro, 1 GPU": lambda: geometry("v4-pro", layers=12),
    "pro, 8 GPUs": lambda: geometry("v4-pro", gpus=8),
    "demo, 1 GPU": demo,
    "demo, 2 GPUs": lambda: demo(2),
}
GEOMETRIES: tuple[Geometry, ...] = ("v4-flash", "v4-pro")
LAYOUTS: tuple[Layout, ...] = ("nvfp4-experts", "nvfp4-all", "native", "bf16", "f32")
SEAM = ["hc_mix", "hc_finish"]
LINEAR = "decode_linear"
SELECTION = ["index_scores", "top_k_tokens"]


@pytest.fixture(scope="module", params=PLANNED)
def planned(request: pytest.FixtureRequest) -> PlannedModel:
    return PLANNED[request.param]()


@pytest.fixture(scope="module")
def step(planned: PlannedModel) -> RecordedStep:
    return planned.record(1)


def expected_parts(planned: PlannedModel) -> list[tuple[str, torch.device, int | None]]:
    """Name, device and layer of every part."""
    expected: list[tuple[str, torch.device, int | None]] = []
    before: torch.device | None = None
    for layer, device in enumerate(planned.layer_devices):
        if before is not None and before != device:
            expected.append((f"layer {layer - 1} mix", before, layer - 1))
        names = ("projections", "attention", "experts")
        expected += [(f"layer {layer} {name}", device, layer) for name in names]
        before = device
    last = len(planned.layer_devices) - 1
    head = planned.layer_devices[-1]
    expected.append((f"layer {last} mix", head, last))
    others = [("head", share.device, None) for share in planned.shares[:-1]]
    behind = [("head", head, None)] if others else []
    return [*expected, ("head", head, None), *others, *behind, ("sample", head, None)]


@pytest.mark.slow
def test_parts_are_named_in_the_order_of_the_model(
    planned: PlannedModel, step: RecordedStep
) -> None:
    parts = compute_parts(step)
    assert len(parts) == len(step.parts)
    found = [(part.name, part.device, part.layer) for part in parts]
    assert found == expected_parts(planned)
    without_sampling = [part for part in found if part[0] != "sample"]
    longer = [part.name for part in planned.record(8).parts]
    assert longer == [name for name, *_ in without_sampling]


def test_every_item_belongs_to_one_part(step: RecordedStep) -> None:
    ends = dict.fromkeys(step.recordings, 0)
    for part in compute_parts(step):
        assert part.start == ends[part.device]
        assert part.stop > part.start
        ends[part.device] = part.stop
    assert ends == {device: len(recording.items) for device, recording in step.recordings.items()}


def test_a_device_touches_only_what_it_has(planned: PlannedModel, step: RecordedStep) -> None:
    """Weights, caches and arrivals of its own, its own buffers, and nothing else but the word in
    which the host looks for NaN and the channels between devices.
    """
    owners = planned.owners()
    shared = {storage_key(planned.state.nan_1)}
    inputs = 0
    for device, recording in step.recordings.items():
        known = {storage_key(tensor) for tensor in recording.zeroed_tensors}
        strangers: set[int] = set()
        for item in recording.items:
            if is_of_channel(item):
                continue
            for tensor in item.tensors:
                key = storage_key(tensor)
                if recording.owns(tensor) or key in known:
                    continue
                assert owners.get(key, device) == device
                strangers |= {key} - owners.keys() - shared
        # What is left is the device's input of token ids.
        assert len(strangers) <= 1
        inputs += len(strangers)
    assert inputs >= 1


def is_of_channel(item: Item) -> bool:
    """``tests/step/test_channels.py`` looks at these."""
    return isinstance(item, Launch) and "uses" in item.arguments


@pytest.mark.parametrize("tokens", [1, 512])
def test_hand_offs_send_streams_that_are_kept_and_drain_behind_their_last_reader(
    planned: PlannedModel, tokens: int
) -> None:
    """In prefill steps, and in decode steps where devices do not reach each other's memory."""
    planned = replace(planned, state=replace(planned.state, channels=None))
    step = planned.record(tokens)
    streams = [tokens, planned.config.hc_mult, planned.config.hidden_size]
    for index, part in enumerate(step.parts):
        if not isinstance(part, Transfer):
            continue
        assert list(part.tensor.shape) == streams
        sender = step.recordings[part.source]
        assert any(part.tensor is kept for kept in sender.kept)
        arrived = storage_key(planned.state.arrivals[part.source, part.target])
        after = step.parts[index + 1 :]
        again = [
            later
            for later, other in enumerate(after)
            if isinstance(other, Transfer) and (other.source, other.target) == part_ends(part)
        ]
        until = after[: again[0]] if again else after
        readers = [later for later, other in enumerate(until) if reads(step, other, arrived)]
        drains = [
            later
            for later, other in enumerate(until)
            if isinstance(other, Part) and (other.drains, other.device) == part_ends(part)
        ]
        assert readers
        assert len(drains) == 1
        assert readers[-1] == drains[0]
    transfers = sum(isinstance(part, Transfer) for part in step.parts)
    assert sum(part.drains is not None for part in compute_parts(step)) == transfers


def part_ends(part: Transfer) -> tuple[torch.device, torch.device]:
    return part.source, part.target


def reads(step: RecordedStep, part: AnyPart, key: int) -> bool:
    if not isinstance(part, Part):
        return False
    items = step.recordings[part.device].items[part.start : part.stop]
    return any(storage_key(tensor) == key for item in items for tensor in item.tensors)


def expected_decode_kernels(planned: PlannedModel, part: Part, tokens: int) -> list[str]:
    """Of the published geometries, whose shapes the fast kernels know."""
    if part.name == "sample":
        return ["sample_token", "send_rows", "store_token"]
    if part.name == "head":
        if part.device != planned.model.head_device:
            return ["receive_rows", LINEAR, "send_rows"]
        shared = {1: ["receive_rows"], 4: [*SEAM, "send_rows", LINEAR]}
        return (shared if planned.shares else {3: [*SEAM, LINEAR]})[part.stop - part.start]
    assert part.layer is not None
    if part.kind == "mix":
        is_last = part.device == planned.model.head_device
        return ["hc_post"] if is_last else ["hc_post", "send_rows"]
    if part.kind == "experts":
        return [*SEAM, "moe_decode"]
    if part.kind == "attention":
        kind = list(layer_kinds(planned.config))[part.layer]
        selection = SELECTION if kind == "CSA" else []
        output = ["decode_pair"] if tokens <= 2 else [LINEAR, LINEAR]
        return ["prepare_attention", *selection, "attention_decode", *output]
    first = part.layer == planned.layer_devices.index(part.device)
    opening: list[str] = []
    if first and part.layer == 0:
        opening = [*(["take_tokens"] if tokens == 1 else []), "embed"]
    elif first:
        opening = ["next_positions", "receive_rows"]
    return [*opening, *SEAM, LINEAR, LINEAR]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_kernels_of_every_part_of_a_decode_step(name: Geometry, layout: Layout) -> None:
    planned = geometry(name, layout, layers=6, gpus=2)
    for tokens in (1, 3, 8):
        step = planned.record(tokens)
        for part in compute_parts(step):
            expected = expected_decode_kernels(planned, part, tokens)
            assert step.launches(part) == expected, part.name
        assert step.unusual_kernels() == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_how_much_every_part_of_a_prefill_step_launches(name: Geometry, layout: Layout) -> None:
    planned = geometry(name, layout, layers=6, gpus=2)
    step = planned.record(512)
    kinds = list(layer_kinds(planned.config))
    for part in compute_parts(step):
        launched = step.launches(part)
        assert "moe_decode" not in launched
        assert LINEAR not in launched
        if part.layer is None or part.kind == "mix":
            assert launched in (["hc_mix_many", "hc_finish"], ["hc_post"])
            continue
        kind = kinds[part.layer]
        if part.kind == "projections":
            inputs = packed_rows(planned.model.blocks[part.layer].attn.input_rows)
            formats = {weight.format for weight in inputs.weights}
            assert launched.count("prefill_rows") == len(formats)
            # Queries have too many rows for one launch.
            assert launched.count("prefill_linear") == (2 if kind == "CSA" else 1)
            assert launched.count("rms_norm") == 1
        elif part.kind == "attention":
            compressors = {"SWA": 0, "HCA": 1, "CSA": 2}[kind]
            assert launched.count("compress") == launched.count("compress_ring") == compressors
            assert launched.count("prefill_linear") == 2
            assert ("top_k_tokens" in launched) == (kind == "CSA")
        else:
            assert launched[-1] == "moe_combine"
            assert launched.count("moe_sort") == 1


def test_every_kernel_of_a_shorter_chunk_is_known_ahead() -> None:
    """``kernels`` is what is compiled at load: nothing may be missing when a prompt comes."""
    engine = EngineConfig(prefill_chunk=4096, max_context=8192)
    for name in GEOMETRIES:
        step = geometry(name, layers=6, engine=engine).record(4096)
        known = {kernel for kernel, _ in step.kernels()}
        shapes = {
            item.shape_of
            for recording in step.recordings.values()
            for item in recording.items
            if not isinstance(item, Call) and item.shape_of is not None
        }
        for tokens in (*range(9, 140, 3), *range(140, 4096, 29), 511, 512, 513, 2047, 2048, 2049):
            found = [shape_of(tokens) for shape_of in shapes]
            assert {shape.kernel for shape in found if shape is not None} <= known, tokens


def test_outputs_belong_to_the_head() -> None:
    planned = geometry("v4-flash", layers=4, gpus=2)
    step = planned.record(1)
    head = step.recordings[step.head]
    outputs = list(tensors_in((*step.outputs, step.token)))
    assert [list(tensor.shape) for tensor in outputs] == [[1, 4096], [1, 129280], []]
    assert all(any(tensor is kept for kept in head.kept) for tensor in outputs)
    assert planned.record(512).outputs.logits_TV is None


def test_the_cutedsl_table_decodes_with_the_same_kernels() -> None:
    planned = geometry("v4-flash", layers=4)
    other = planned.on(CUTEDSL_TABLE)
    for tokens in (1, 8):
        assert planned.record(tokens).kernels() == other.record(tokens).kernels()


def test_every_kernel_that_compares_tells_the_host_of_nan(
    planned: PlannedModel, step: RecordedStep
) -> None:
    ratios = planned.config.compress_ratios
    words = [
        item.arguments["nan"]
        for recording in step.recordings.values()
        for item in recording.items
        if isinstance(item, Launch) and "nan" in item.arguments
    ]
    # Index scores, the router of every layer, and the store of the token.
    assert len(words) >= ratios.count(4) + len(ratios) + (step.token is not None)
    assert all(word is planned.state.nan_1 for word in words)
