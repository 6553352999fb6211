"""Names of values in few words."""

from dsv4.validate.names import column_of, one_sided


def test_ranges_of_layers_are_in_their_order() -> None:
    names = [f"layers.{layer}.attn.q" for layer in (8, 1, 16, 2)]
    (line,) = one_sided(names, [], ["hidden"])
    assert line == "only in ours, or without its ids: layers.1-2,8,16.*"


def test_the_values_of_a_layer_stand_in_its_column() -> None:
    names = ("layers.3.attn.q", "layers.10.streams", "hidden")
    assert [column_of(name) for name in names] == ["layer 3", "layer 10", "hidden"]
