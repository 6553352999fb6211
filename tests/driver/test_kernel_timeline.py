"""The timeline of a decoded token from invented events: places, gaps, overlaps, hops between
devices.
"""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.measure.graph_profile import GraphProfile, rank_timelines, rounded, step_launches
from dsv4.measure.kernel_timeline import (
    GAPS,
    HOPS,
    DeviceEvent,
    StepLaunch,
    TokenTimeline,
    median_token,
    token_timelines,
)
from dsv4.step.kernel_names import CALL
from tests.driver.recorded import recorded_step

KINDS = ("SWA", "CSA", "HCA", "CSA")


def launches(part: str, layer: int | None, *names: str) -> list[StepLaunch]:
    kind = "head" if layer is None else KINDS[layer]
    return [StepLaunch(name, part, layer, kind) for name in names]


def layer_launches(layer: int) -> list[StepLaunch]:
    """Kernels of the same name in several places of a layer."""
    return [
        *launches(f"layer {layer} projections", layer, "gemm"),
        *launches(f"layer {layer} attention", layer, KINDS[layer].lower()),
        *launches(f"layer {layer} experts", layer, "mix", "gemm"),
    ]


# A kernel of the layers is the head's too, and one of the layers' has the name of the token's last
# one.
HEAD = [*launches("head", None, "mix", "gemm"), *launches("sample", None, "argmax", "csa")]
ONE_DEVICE = {
    0: [
        *launches("layer 0 projections", 0, "embed"),
        *[launch for layer in range(4) for launch in layer_launches(layer)],
        *launches("layer 3 mix", 3, "hc_post"),
        *HEAD,
    ]
}


def segment(layer: int) -> list[StepLaunch]:
    """A layer between two hand-offs."""
    first = {0: ("embed",), 1: ("position",)}.get(layer, ())
    return [
        *launches(f"layer {layer} projections", layer, *first),
        *layer_launches(layer),
        *launches(f"layer {layer} mix", layer, "mix"),
    ]


TWO_DEVICES = {0: [*segment(0), *segment(2)], 1: [*segment(1), *segment(3), *HEAD]}


class Recorder:
    """Events one behind the other: 10 µs each, with a gap before it."""

    def __init__(self) -> None:
        self.events: list[DeviceEvent] = []
        self.now = 0.0

    def run(self, device: int, *names: str, gap: float = 0.0, us: float = 10.0) -> None:
        for name in names:
            self.now += gap
            self.events.append(DeviceEvent(name, device, self.now, us))
            self.now += us


def one_device() -> list[TokenTimeline]:
    """Four tokens: 1 µs before every kernel of a layer, and another gap before the last layer's
    mix.
    """
    recorder = Recorder()
    for extra in (3.0, 0.0, 5.0, 1.0):
        for launch in ONE_DEVICE[0]:
            in_layer = launch.layer is not None and launch.name != "embed"
            recorder.run(0, launch.name, gap=extra if launch.name == "hc_post" else float(in_layer))
    return token_timelines(recorder.events, ONE_DEVICE, 4)


def two_devices() -> TokenTimeline:
    """Round-robin over two devices: a hop before every layer but the first, and the token's."""
    recorder = Recorder()
    for _ in range(2):
        if recorder.events:
            recorder.run(1, "Memcpy PtoP (Device -> Device)", gap=2.0, us=1.0)
            recorder.now += 1.0
        for layer in range(4):
            if layer:
                recorder.run(1 - layer % 2, "Memcpy PtoP (Device -> Device)", gap=2.0, us=1.0)
                recorder.now += 1.0
            recorder.run(layer % 2, *[launch.name for launch in segment(layer)])
        recorder.run(1, *[launch.name for launch in HEAD])
    (timeline,) = token_timelines(recorder.events, TWO_DEVICES, 2)
    return timeline


def test_first_token_has_no_beginning() -> None:
    assert [timeline.us for timeline in one_device()] == [236.0, 241.0, 237.0]


def test_median_token_is_the_middle_one() -> None:
    assert median_token(one_device()).us == 237.0
    assert median_token(one_device()[:2]).us == 236.0


def test_nth_kernel_of_a_token_is_the_nth_launch() -> None:
    for token in one_device():
        found = [StepLaunch(node.name, node.part, node.layer, node.kind) for node in token.nodes]
        assert found == ONE_DEVICE[0]
    assert one_device()[0].layer_us() == {0: 54.0, 1: 44.0, 2: 44.0, 3: 54.0}


def test_places_do_not_depend_on_the_names_of_events() -> None:
    events = [DeviceEvent("?", 0, 10.0 * index, 10.0) for index in range(2 * len(ONE_DEVICE[0]))]
    (token,) = token_timelines(events, ONE_DEVICE, 2)
    assert [node.name for node in token.nodes] == [launch.name for launch in ONE_DEVICE[0]]


@pytest.mark.parametrize("lost", [0, 3, -1])
def test_other_number_of_kernels_is_an_error(lost: int) -> None:
    events = [DeviceEvent("x", 0, 10.0 * index, 10.0) for index in range(44)]
    del events[lost]
    message = "--profile: found 43 kernels on cuda:0, expected 2 tokens of 22 each"
    with pytest.raises(UserError, match=message):
        token_timelines(events, ONE_DEVICE, 2)


def test_kernels_of_another_device_are_an_error() -> None:
    events = [DeviceEvent("x", int(index == 44), 10.0 * index, 10.0) for index in range(45)]
    with pytest.raises(UserError, match="found 1 kernels on cuda:1, expected 2 tokens of 0 each"):
        token_timelines(events, ONE_DEVICE, 2)


def test_kernels_and_gaps_are_the_whole_token() -> None:
    token = one_device()[1]
    rows = {row.name: row for row in token.rows()}
    assert sum(row.us for row in rows.values()) == token.us
    assert (rows["gemm"].count, rows["gemm"].us) == (9, 90.0)
    assert rows["csa"].by_kind == {"CSA": 10.0, "head": 10.0}
    assert rows["gemm"].by_kind == {"SWA": 20.0, "CSA": 20.0, "HCA": 20.0, "head": 10.0}
    assert (rows[GAPS].count, rows[GAPS].us) == (17, 21.0)
    assert sum(row.gap_us or 0 for row in rows.values()) == 21.0
    assert (rows["hc_post"].gap_us, rows["argmax"].gap_us, rows[GAPS].gap_us) == (5.0, 0.0, None)
    assert HOPS not in rows


def test_what_overlaps_counts_once() -> None:
    step = {0: launches("layer 0 projections", 0, "a", "b", "c")}
    times = [(-30.0, 1.0), (-20.0, 1.0), (0.0, 1.0), (1.0, 10.0), (6.0, 10.0), (20.0, 1.0)]
    (token,) = token_timelines([DeviceEvent("x", 0, *time) for time in times], step, 2)
    assert [(node.duration_us, node.added_us, node.gap_us) for node in token.nodes] == [
        (10.0, 10.0, 0.0),
        (10.0, 5.0, 0.0),
        (1.0, 1.0, 4.0),
    ]
    assert token.us == 20.0


def test_hops_are_apart_from_gaps() -> None:
    token = two_devices()
    hops = [node for node in token.nodes if node.hop]
    assert [node.name for node in hops] == ["embed", "position", "gemm", "gemm"]
    assert token.hop_us == 4 * 4.0
    assert token.gap_us == 0.0
    assert len(token.hand_offs) == 4
    assert sum(token.busy_us().values()) + token.hop_us == token.us
    assert token.busy_us() == {0: 110.0, 1: 150.0}


def test_layers_of_every_device_are_found() -> None:
    token = two_devices()
    assert token.layer_us() == {0: 60.0, 1: 60.0, 2: 50.0, 3: 50.0}
    assert {node.layer for node in token.nodes if node.device == 0} == {0, 2}
    assert {node.kind for node in token.nodes if node.device == 1 and node.layer == 3} == {"CSA"}


def test_kernels_of_a_kind_in_their_order_as_most_of_its_layers_have_them() -> None:
    (token, *_) = one_device()
    alike = [("gemm", 11.0), ("csa", 11.0), ("mix", 11.0), ("gemm", 11.0)]
    assert token.layer_sequences()["CSA"] == alike
    assert two_devices().layer_sequences()["HCA"][-1] == ("mix", 10.0)


def test_record_has_what_the_table_has() -> None:
    record = two_devices().record()
    assert record["us_per_layer"] == {"SWA": 60.0, "CSA": 55.0, "HCA": 50.0}
    assert (record["hops"], record["hop_us"]) == (4, 16.0)
    assert (record["hand_off_copies"], record["hand_off_copy_us"]) == (4, 4.0)
    nodes = two_devices().node_records()
    assert len(nodes) == 26
    assert (nodes[0]["name"], nodes[0]["part"], nodes[0]["layer"], nodes[0]["kind"]) == (
        "embed",
        "layer 0 projections",
        0,
        "SWA",
    )


def test_table_names_kernels_kinds_and_devices() -> None:
    text = two_devices().table()
    heading, *lines = text.splitlines()
    assert heading.split()[-6:] == ["µs", "each:", "SWA", "CSA", "HCA", "head"]
    assert lines[-7] == "  276.0 µs in all: gaps 0.0, hops 16.0 (4 hand-off copies take 4.0)"
    assert lines[-5] == "  cuda:0 busy 110.0 µs, idle 166.0 µs (60.1 %)"
    assert lines[-1] == "  HCA: gemm 10.0 · hca 10.0 · mix 10.0 · gemm 10.0 · mix 10.0"


def two_ranks() -> GraphProfile:
    """Both run the same kernels side by side, the second one 2 µs slower each."""
    events = []
    for rank, us in enumerate((10.0, 12.0)):
        recorder = Recorder()
        for _ in range(3):
            recorder.run(rank, *[launch.name for launch in ONE_DEVICE[0]], us=us)
        events += recorder.events
    ranks = [{rank: ONE_DEVICE[0]} for rank in range(2)]
    timelines = rank_timelines(events, ranks, 3)
    return GraphProfile("full", 2, tuple(median_token(found) for found in timelines))


def test_every_rank_has_a_timeline_of_its_own() -> None:
    profile = two_ranks()
    assert [token.us for token in profile.ranks] == [220.0, 264.0]
    assert [set(token.busy_us()) for token in profile.ranks] == [{0}, {1}]
    assert all(token.hop_us == 0 for token in profile.ranks)
    record = profile.record(nodes=False)
    assert [rank["us"] for rank in record["ranks"]] == [220.0, 264.0]
    blocks = profile.table().split("rank ")
    assert [block.splitlines()[0] for block in blocks[1:]] == ["0", "1"]
    assert "cuda:1 busy 264.0 µs" in blocks[2]


def test_a_lone_rank_is_recorded_as_the_token() -> None:
    profile = GraphProfile("full", 1, (two_devices(),))
    assert profile.record() == rounded(
        {
            "mode": "full",
            "tokens": 1,
            **two_devices().record(),
            "nodes": two_devices().node_records(),
        }
    )
    assert profile.table() == two_devices().table()


def test_launches_of_a_step_are_listed_by_device() -> None:
    devices = (torch.device("cuda", 0), torch.device("cuda", 1))
    assert step_launches(recorded_step(*devices), KINDS, dense=False) == {
        0: [*launches("layer 0 projections", 0, "embed"), *launches("layer 0 mix", 0, "gemm")],
        1: [
            *launches("layer 1 experts", 1, "gemm"),
            *launches("head", None, CALL),
            *launches("sample", None, "store"),
        ],
    }


def test_records_are_rounded() -> None:
    found = rounded(
        {"us": 1.00000004, "layers": {0: [2.5]}, "name": "a", "hop": True, "pairs": [("a", 0.1254)]}
    )
    assert found == {
        "us": 1.0,
        "layers": {0: [2.5]},
        "name": "a",
        "hop": True,
        "pairs": [["a", 0.13]],
    }
