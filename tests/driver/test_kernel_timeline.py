"""The timeline of a decoded token from invented events: layers, gaps, overlaps, hops between devices."""

import pytest

from dsv4.cli.graph_profile import kernel_name, rounded
from dsv4.cli.kernel_timeline import GAPS, HOPS, DeviceEvent, TokenTimeline, median_token, token_timelines

KINDS = ("SWA", "CSA", "HCA", "CSA")
HEAD_KERNELS = ("hc_mix", "lm_head", "argmax", "store_token")


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

    def layer(self, device: int, attention: str, gap: float = 0.0) -> None:
        self.run(device, "hc_mix", attention, "moe_decode", gap=gap)


def one_device() -> list[TokenTimeline]:
    recorder = Recorder()
    recorder.run(0, "half a token", "store_token")
    for extra in (0.0, 5.0, 1.0):
        recorder.run(0, "embed")
        for kind in KINDS:
            recorder.layer(0, kind.lower(), gap=1.0)
        recorder.run(0, "hc_post", gap=extra)
        recorder.run(0, *HEAD_KERNELS)
    return token_timelines(recorder.events, {0: (0, 1, 2, 3)}, KINDS)


def two_devices(kinds: tuple[str, ...] = KINDS) -> TokenTimeline:
    """Round-robin over two devices: a hop before every layer but the first, and one of the token."""
    recorder = Recorder()
    recorder.run(1, "store_token")
    recorder.run(1, "Memcpy PtoP", gap=2.0, us=1.0)
    recorder.run(0, "embed", gap=1.0)
    for layer, kind in enumerate(kinds):
        if layer:
            recorder.run(1 - layer % 2, "Memcpy PtoP", gap=2.0, us=1.0)
            recorder.now += 1.0
        recorder.run(layer % 2, *(["position"] if layer == 1 else []))
        recorder.layer(layer % 2, kind.lower())
        recorder.run(layer % 2, "hc_post")
    recorder.run(1, *HEAD_KERNELS)
    (timeline,) = token_timelines(recorder.events, {0: (0, 2), 1: (1, 3)}, kinds)
    return timeline


def test_token_under_way_when_recording_began_is_left_out() -> None:
    assert [timeline.us for timeline in one_device()] == [192.0, 197.0, 193.0]


def test_median_token_is_the_middle_one() -> None:
    assert median_token(one_device()).us == 193.0
    assert median_token(one_device()[:2]).us == 192.0


def test_a_layer_ends_with_its_moe_and_owns_the_mix_behind_it() -> None:
    token = one_device()[0]
    assert [node.layer for node in token.nodes] == [None, *[0] * 3, *[1] * 3, *[2] * 3, *[3] * 4, *[None] * 4]
    assert [node.part for node in token.nodes if node.layer is None] == ["start", *["head"] * 4]
    assert token.layer_us() == {0: 33.0, 1: 33.0, 2: 33.0, 3: 43.0}


def test_kernels_and_gaps_are_the_whole_token() -> None:
    token = one_device()[1]
    rows = {row.name: row for row in token.rows()}
    assert sum(row.us for row in rows.values()) == token.us
    assert (rows["moe_decode"].count, rows["moe_decode"].us) == (4, 40.0)
    assert rows["csa"].by_part == {"CSA": 10.0}
    assert rows["hc_mix"].by_part == {"SWA": 10.0, "CSA": 10.0, "HCA": 10.0, "head": 10.0}
    assert (rows[GAPS].count, rows[GAPS].us) == (13, 17.0)
    assert sum(row.gap_us or 0 for row in rows.values()) == 17.0
    assert (rows["hc_post"].gap_us, rows["store_token"].gap_us, rows[GAPS].gap_us) == (5.0, 0.0, None)
    assert HOPS not in rows


def test_what_overlaps_counts_once() -> None:
    events = [
        DeviceEvent("store_token", 0, 0.0, 1.0),
        DeviceEvent("hc_mix", 0, 1.0, 10.0),
        DeviceEvent("moe_decode", 0, 6.0, 10.0),
        DeviceEvent("store_token", 0, 20.0, 1.0),
    ]
    (token,) = token_timelines(events, {0: (0,)}, ("SWA",))
    assert [(node.duration_us, node.added_us, node.gap_us) for node in token.nodes] == [
        (10.0, 10.0, 0.0),
        (10.0, 5.0, 0.0),
        (1.0, 1.0, 4.0),
    ]
    assert token.us == 20.0


def test_hops_are_apart_from_gaps() -> None:
    token = two_devices()
    hops = [node for node in token.nodes if node.hop]
    assert [node.name for node in hops] == ["embed", "position", "hc_mix", "hc_mix"]
    assert token.hop_us == 4 * 4.0
    assert token.gap_us == 0.0
    assert len(token.hand_offs) == 4
    assert sum(token.busy_us().values()) + token.hop_us == token.us
    assert token.busy_us() == {0: 90.0, 1: 130.0}


def test_layers_of_every_device_are_found() -> None:
    token = two_devices()
    assert token.layer_us() == dict.fromkeys(range(4), 40.0)
    assert [node.part for node in token.nodes if node.name == "position"] == ["start"]
    assert {node.part for node in token.nodes if node.device == 1 and node.layer == 3} == {"CSA"}


def test_kernels_of_a_kind_in_their_order_as_most_of_its_layers_have_them() -> None:
    (token, *_) = one_device()
    assert token.layer_sequences()["CSA"] == [("hc_mix", 11.0), ("csa", 11.0), ("moe_decode", 11.0)]
    assert two_devices().layer_sequences()["HCA"][-1] == ("hc_post", 10.0)


def test_record_has_what_the_table_has() -> None:
    record = two_devices().record()
    assert record["us_per_layer"] == {"SWA": 40.0, "CSA": 40.0, "HCA": 40.0}
    assert (record["hops"], record["hop_us"]) == (4, 16.0)
    assert (record["hand_off_copies"], record["hand_off_copy_us"]) == (4, 4.0)
    assert len(two_devices().node_records()) == 22


def test_table_names_kernels_kinds_and_devices() -> None:
    text = two_devices().table()
    heading, *lines = text.splitlines()
    assert heading.split()[-7:] == ["µs", "each:", "start", "SWA", "CSA", "HCA", "head"]
    assert lines[-7] == "  236.0 µs in all: gaps 0.0, hops 16.0 (4 hand-off copies take 4.0)"
    assert lines[-5] == "  cuda:0 busy 90.0 µs, idle 146.0 µs (61.9 %)"
    assert lines[-1] == "  HCA: hc_mix 10.0 · hca 10.0 · moe_decode 10.0 · hc_post 10.0"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("moe_decode", "moe_decode"),
        ("void at::native::index_elementwise_kernel<128, 4, at::native::f(int)>(int)", "index_elementwise_kernel"),
        (
            "void (anonymous namespace)::elementwise_kernel_with_index<int, arange()>(int)",
            "elementwise_kernel_with_index",
        ),
        ("Memcpy PtoP (Device -> Device)", "Memcpy PtoP"),
    ],
)
def test_kernels_are_called_by_their_own_name(found: str, expected: str) -> None:
    assert kernel_name(found) == expected


def test_records_are_rounded() -> None:
    assert rounded({"us": 1.00000004, "layers": {0: [2.5]}, "name": "a", "hop": True, "pairs": [("a", 0.1254)]}) == {
        "us": 1.0,
        "layers": {0: [2.5]},
        "name": "a",
        "hop": True,
        "pairs": [["a", 0.13]],
    }
