"""The plot says what it shows: kinds, threshold, NaN, and which values are under it."""

import math
from xml.etree import ElementTree

from dsv4.validate.plot import Point, cosine_svg

POINTS = [
    Point("layer 0", "layers.0.attn.q", "SWA", 0.99999, 1.0, True),
    Point("layer 0", "layers.0.<x>", "SWA", 0.5, 0.99999, False),
    Point("layer 1", "layers.1.attn.q", "CSA", math.nan, math.nan, False),
    Point("logits", "logits", "", 1.0, 1.0, True),
]


def groups(svg: str) -> dict[str, str]:
    """The drawn marks by the start of their titles."""
    root = ElementTree.fromstring(svg)
    name = "{http://www.w3.org/2000/svg}"
    found = {}
    for group in root.iter(f"{name}g"):
        title = group.find(f"{name}title")
        assert title is not None
        found[(title.text or "").split(":")[0]] = ElementTree.tostring(group, "unicode")
    return found


def test_columns_have_kinds_and_the_threshold_has_a_name() -> None:
    svg = cosine_svg(POINTS, 0.9999)
    assert ">layer 0 SWA<" in svg
    assert ">layer 1 CSA<" in svg
    assert svg.count(">layer 0 SWA<") == 1
    assert ">threshold 0.9999<" in svg
    assert "worst token" in svg


def test_what_is_under_the_threshold_has_another_colour_and_nan_another_mark() -> None:
    found = groups(cosine_svg(POINTS, 0.9999))
    assert len(found) == len(POINTS)
    assert "#06c" in found["layers.0.attn.q SWA"]
    assert "#c00" not in found["layers.0.attn.q SWA"]
    assert "#c00" in found["layers.0.<x> SWA"]
    assert "path" in found["layers.1.attn.q CSA"]
    assert "circle" not in found["layers.1.attn.q CSA"]
    assert "path" not in found["logits "]


def test_61_layers_fit() -> None:
    points = [Point(f"layer {i}", f"layers.{i}.streams", "CSA", 1.0, 1.0, True) for i in range(61)]
    assert len(groups(cosine_svg(points, 0.9999))) == 61
