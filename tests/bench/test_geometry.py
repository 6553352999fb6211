"""What the geometry benchmark compares with: the bytes a token needs, for the published models and
formats.
"""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from dsv4.bench import engine_flags, random_engine
from dsv4.bench.__main__ import main
from dsv4.bench.geometry import GeometryRun, prefill_rate
from dsv4.bench.geometry_bytes import read_bytes, stored_bytes, token_bytes
from dsv4.bench.random_engine import refuse_if_too_large
from dsv4.checkpoint import Geometry, Layout, geometry_config
from dsv4.checkpoint.layouts import format_in
from dsv4.config import CSA_RATIO, ModelConfig
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.model import Transformer
from dsv4.ops.linear import gathered_rows
from dsv4.ops.tables import CUDA_TABLE
from dsv4.parallel.placement import Placement, Stage
from dsv4.step.planned import planned_weight
from dsv4.weights.parameters import parameters

MILLION = 1 << 20
# GB per token by published parameter counts and formats (six routed experts and the shared one, no
# embedding).
PUBLISHED = {
    ("v4-pro", "nvfp4-all"): 30.48,
    ("v4-pro", "nvfp4-experts"): 40.41,
    ("v4-pro", "native"): 39.66,
    ("v4-flash", "nvfp4-all"): 8.85,
    ("v4-flash", "nvfp4-experts"): 11.41,
    ("v4-flash", "native"): 11.21,
}


@pytest.mark.parametrize(("geometry", "layout"), PUBLISHED)
def test_bytes_per_token_of_the_published_models(geometry: Geometry, layout: Layout) -> None:
    config = ModelConfig.from_dict(geometry_config(geometry))
    whole = sum(token_bytes(config, layout).values())
    assert whole / 1e9 == pytest.approx(PUBLISHED[geometry, layout], rel=0.01)
    dense = sum(token_bytes(config, layout, dense=True).values())
    asked = config.index_n_heads * config.index_head_dim * config.q_lora_rank
    layers = config.compress_ratios.count(CSA_RATIO)
    # FP8 or NVFP4, with their scales.
    assert 0.5 < (whole - dense) / (asked * layers) < 1.01


def test_ranks_read_a_share_of_the_input_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those of the layer, as the model lists them."""
    monkeypatch.setattr(gathered_rows, "LEAST_SAVED", 1)
    config = ModelConfig.from_dict(geometry_config("v4-flash", 3))
    found = parameters(config)
    weights = {
        one.name: planned_weight(one, format_in("nvfp4-experts", one)) for one in found.values()
    }
    devices = (torch.device("meta"),) * 3
    model = Transformer.build(config, weights, CUDA_TABLE.packing, devices, torch.bfloat16)
    sizes = read_bytes(found.values(), "nvfp4-experts", 4)
    shared = {
        name for name, one in found.items() if sizes[name] < stored_bytes(one, "nvfp4-experts")
    }
    # Windows, windows, CSA.
    rows = [block.attn.input_rows for segment in model.segments for block in segment.blocks]
    assert [len(one.weights) for one in rows] == [2, 2, 7]
    shapes = sorted(tuple(weight.shape) for one in rows for weight in one.weights)
    assert sorted(tuple(found[name].shape) for name in shared) == shapes
    # Nothing that two ranks would not share in a step.
    monkeypatch.undo()
    sizes = read_bytes(found.values(), "nvfp4-experts", 2)
    assert {name for name in shared if name.startswith("layers.2.")} == {
        name for name, one in found.items() if sizes[name] < stored_bytes(one, "nvfp4-experts")
    }


def test_a_slice_has_the_first_layers() -> None:
    config = ModelConfig.from_dict(geometry_config("v4-flash", 5))
    assert config.compress_ratios == (0, 0, 4, 128, 4)
    assert config.hash_layers == (True, True, True, False, False)
    assert ModelConfig.from_dict(geometry_config("v4-flash", 2)).hash_layers == (True, True)


@pytest.mark.parametrize(("name", "layers"), [("v4-nano", None), ("v4-pro", 0), ("v4-pro", 62)])
def test_unknown_geometry_and_layers_are_user_errors(name: Geometry, layers: int | None) -> None:
    with pytest.raises(UserError, match=r"^--(geometry|layers): found"):
        geometry_config(name, layers)


@pytest.mark.parametrize(
    ("prompt", "position", "decode_tokens", "message"),
    [
        (MILLION - 320, MILLION - 320, 64, None),
        (8, MILLION - 319, 64, "--positions: found 1048257 with --decode-tokens 64, expected at "),
        (MILLION, 8, 64, "--prompts: found 1048576 with --decode-tokens 64, expected at most 104"),
        (8, MILLION - 563, 500, "--positions: found 1048013 with --decode-tokens 500, expected a"),
        (1, 1, MILLION - 65, None),
        (1, 1, MILLION - 64, "--decode-tokens: found 1048512, expected at most 1048511"),
    ],
)
def test_what_is_longer_than_the_model_is_made_for_is_refused_by_its_flag(
    prompt: int, position: int, decode_tokens: int, message: str | None
) -> None:
    """Before weights are drawn, and not by ``--max-context``, which this command does not have."""
    engine = EngineConfig()
    lengths = ((1, prompt), (position,), decode_tokens)
    run = GeometryRun("v4-flash", "nvfp4-experts", 2, engine, *lengths, None, False)
    assert run.max_context > max(prompt, position) + decode_tokens
    with pytest.raises(UserError, match=f"^{message}") if message else nullcontext():
        run.check_lengths()


def test_the_command_checks_lengths_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_flags, "need_cuda", lambda: None)
    monkeypatch.setattr(engine_flags, "check_modes", lambda *_: None)
    assert main(["engine", "--geometry", "v4-flash", "--positions", str(MILLION)]) == 2
    assert capsys.readouterr().err.startswith("error: --positions: found 1048576 with")


def test_weights_that_have_no_room_are_refused_with_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_engine, "available_bytes", lambda device: 5 << 30)
    both = torch.device("cuda", 0), torch.device("cuda", 1)
    layer_bytes = [1 << 30] * 8
    apart = Placement.round_robin(8, both)
    refuse_if_too_large(apart, layer_bytes)
    refuse_if_too_large(Placement.tensor(8, both), layer_bytes)
    refuse_if_too_large(Placement((Stage(tuple(range(8)), both),), 6), [5 << 30] * 8)
    refused = (
        r"^memory: cuda:0: found 5,120 MiB available, expected at least 8,192 for its weights; "
        r"use more GPUs or fewer --layers$"
    )
    with pytest.raises(UserError, match=refused):
        refuse_if_too_large(Placement.pipeline(layer_bytes, both[:1]), layer_bytes)
    with pytest.raises(UserError, match=refused):
        refuse_if_too_large(apart, [2 << 30] * 8)


def test_without_a_gpu_the_command_says_so(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["engine", "--geometry", "v4-flash"]) == 2
    assert main(["ops"]) == 2
    assert capsys.readouterr().err.count("error: this benchmark needs a CUDA device") == 2


@pytest.mark.parametrize(("length", "lengths"), [(128, [128, 127, 128]), (1, [1, 1, 1])])
def test_a_prompt_has_another_length_than_the_one_before(length: int, lengths: list[int]) -> None:
    """Steps of the length before are queued as they are, which no user has."""
    engine = Mock()
    engine.config.vocab_size = 100
    engine.state.all_devices = ()
    assert prefill_rate(engine, length) > 0
    assert [len(call.args[0]) for call in engine.prefill.call_args_list] == lengths
    assert engine.reset.call_count == 3
