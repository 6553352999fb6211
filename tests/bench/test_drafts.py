"""What the benchmark of drafts compares with, and what it refuses."""

import pytest

from dsv4.bench.__main__ import main
from dsv4.bench.drafts import DraftBytes, drafted_geometry
from dsv4.checkpoint import geometry_config
from dsv4.config import ModelConfig
from dsv4.weights.parameters import MtpKind

DISTINCT = 20.0


@pytest.mark.parametrize("kind", ["classic", "dspark"])
def test_ranks_read_half_of_what_is_cut_and_all_of_the_rest(kind: MtpKind) -> None:
    config = ModelConfig.from_dict(drafted_geometry(geometry_config("v4-flash"), kind))
    one, two = (DraftBytes(config, "nvfp4-experts", kind, ranks) for ranks in (1, 2))
    for found, whole in (
        (two.draft(1, DISTINCT), one.draft(1, DISTINCT)),
        (two.verify(DISTINCT, dense=False), one.verify(DISTINCT, dense=False)),
    ):
        assert 0.5 < found / whole < 0.65
    # What every draft of DSpark reads again is the Markov head, which is whole on every rank.
    if kind == "dspark":
        again = [of.draft(2, DISTINCT) - of.draft(1, DISTINCT) for of in (one, two)]
        assert again[0] == again[1] == 2 * config.vocab_size * 256


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--parallel round-robin", "--draft: found with --parallel round-robin, expected pipeline"),
        ("--parallel tensor --ranks 8", "--draft: found with --ranks, expected all ranks"),
        ("--modes split", "--draft: found with --modes split, expected full alone"),
        ("--modes full eager", "--draft: found with --modes full eager, expected full alone"),
    ],
)
def test_what_drafts_are_not_measured_with_is_said(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = "--geometry v4-flash --gpus 2 --draft mtp"
    assert main(["engine", *common.split(), *flags.split()]) == 2
    assert said in capsys.readouterr().err
