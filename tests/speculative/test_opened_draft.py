"""Which draft module a run has: of the checkpoint or of a folder, refused in one line, counted."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.caches.draft import DraftState
from dsv4.caches.rows import RowFormat
from dsv4.checkpoint import synthetic_weights, tiny_config, write_synthetic
from dsv4.checkpoint.state_file import StateKey
from dsv4.checkpoint.weights_folder import write_draft
from dsv4.config import ModelConfig
from dsv4.errors import UserError
from dsv4.layers.classic_mtp import ClassicMTP
from dsv4.layers.dspark import DSpark
from dsv4.opened_checkpoint import OpenedCheckpoint
from dsv4.ops.trees import tensors_in
from dsv4.parallel.placement import Placement
from dsv4.speculative.memory import DraftMemory
from dsv4.speculative.planned import draft_bytes
from dsv4.weights.parameters import MtpKind
from tests.model.tiny import CPU, random_ids

KEYS = {
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 200,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 32,
}
SETTINGS = EngineConfig(device="cpu", max_context=64)
FLAGS: dict[MtpKind, Any] = {"classic": "mtp", "dspark": "dspark"}


def raw_config(kind: MtpKind | None) -> dict[str, Any]:
    return tiny_config(max_position_embeddings=4096, **(KEYS if kind == "dspark" else {}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a module, ``main``, and beside it the folders of two modules."""
    root = tmp_path_factory.mktemp("folders")
    write_synthetic(root / "main", raw_config(None), "nvfp4-experts", 0)
    kinds: tuple[MtpKind, ...] = ("classic", "dspark")
    for kind in kinds:
        raw = raw_config(kind)
        config = ModelConfig.from_dict(raw)
        weights = synthetic_weights(config, "nvfp4-experts", 1, lambda _: CPU, kind)
        write_draft(root / kind, raw, "nvfp4-experts", weights)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classic", "dspark"])
def test_a_folder_beside_the_checkpoint_holds_the_module(kind: MtpKind, folders: Path) -> None:
    for flag in ("auto", FLAGS[kind]):
        given: dict[str, Any] = {"draft": flag, "draft_weights": str(folders / kind)}
        engine = Engine.load(folders / "main", dataclasses.replace(SETTINGS, **given))
        assert isinstance(engine.draft_modules[0], ClassicMTP if kind == "classic" else DSpark)
        greedy = SamplingParams(temperature=0)
        found = list(engine.generate(random_ids(9), 8, greedy, frozenset()))
        plain = Engine.load(folders / "main", SETTINGS)
        assert found == list(plain.generate(random_ids(9), 8, greedy, frozenset()))


def test_states_go_from_runs_with_drafts_to_runs_without(folders: Path, tmp_path: Path) -> None:
    given = {"draft_weights": str(folders / "dspark")}
    engine = Engine.load(folders / "main", dataclasses.replace(SETTINGS, **given))
    engine.prefill(random_ids(9))
    engine.save_state(tmp_path / "state")
    plain = Engine.load(folders / "main", SETTINGS)
    plain.load_state(tmp_path / "state")
    assert plain.token_ids == random_ids(9)


def test_a_module_of_another_folder_has_weights_of_its_own(folders: Path) -> None:
    alone = OpenedCheckpoint.open(folders / "main", SETTINGS).identity()
    assert alone.main == alone.draft
    settings = dataclasses.replace(SETTINGS, draft_weights=str(folders / "dspark"))
    beside = OpenedCheckpoint.open(folders / "main", settings).identity()
    assert beside.main == alone.main != beside.draft


def test_keys_of_a_draft_module_make_no_other_state() -> None:
    """A command checks a state by the checkpoint's own config, before the engine is there."""
    brought, none = (ModelConfig.from_dict(raw_config(kind)) for kind in ("dspark", None))
    assert brought.dspark is not None
    none = dataclasses.replace(none, compress_ratios=brought.compress_ratios)
    assert StateKey.of(brought, SETTINGS, "a") == StateKey.of(none, SETTINGS, "a")


@pytest.mark.parametrize("kind", ["classic", "dspark"])
def test_the_plan_counts_weights_and_caches_of_the_module(kind: MtpKind, folders: Path) -> None:
    given = {"draft_weights": str(folders / kind)}
    settings = dataclasses.replace(SETTINGS, **given)
    with_module = Engine.plan(folders / "main", settings).devices[0]
    without = Engine.plan(folders / "main", SETTINGS).devices[0]
    engine = Engine.load(folders / "main", settings)
    assert engine.state.draft is not None
    assert with_module.state_bytes - without.state_bytes == engine.state.draft.nbytes
    file = folders / kind / "model.safetensors"
    stored = with_module.weight_bytes - without.weight_bytes
    assert stored == pytest.approx(file.stat().st_size, rel=0.2)
    assert with_module.ops_bytes > without.ops_bytes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"draft": "mtp"}, "main: draft module: found none, expected mtp"),
        ({"draft": "mtp", "draft_weights": "dspark"}, "module: found dspark, expected mtp"),
        ({"draft_weights": "main"}, "main: draft module: found none, expected mtp or dspark"),
        ({"draft_weights": "absent"}, "absent: no such folder"),
        ({"draft_weights": "dspark", "draft_tokens": 6}, r"draft_tokens: found 6, expected 1 to 5"),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(
    given: dict[str, Any], said: str, folders: Path
) -> None:
    if "draft_weights" in given:
        given = {**given, "draft_weights": str(folders / given["draft_weights"])}
    with pytest.raises(UserError, match=said) as error:
        Engine.plan(folders / "main", dataclasses.replace(SETTINGS, **given))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"dspark_noise_token_id": 5000, "vocab_size": 6000}, "noise_token_id: found 5000, "),
        (
            {
                "num_hidden_layers": 6,
                "compress_ratios": [0, 4, 128, 4, 0, 0, 0, 0, 0],
                "dspark_target_layer_ids": [3, 4, 5],
            },
            "target_layer_ids: found 5, expected layers below 4",
        ),
    ],
)
def test_keys_of_another_model_s_module_are_refused_by_the_plan(
    keys: dict[str, Any], said: str, folders: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(folders / "dspark", folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **keys}))
    given = dataclasses.replace(SETTINGS, draft_weights=str(folder))
    with pytest.raises(UserError, match=rf"other/config\.json: dspark_{said}"):
        Engine.plan(folders / "main", given)


@pytest.mark.parametrize("kind", ["classic", "dspark"])
def test_the_plan_of_a_gpu_counts_what_the_module_takes(kind: MtpKind, folders: Path) -> None:
    on_gpu = EngineConfig(max_context=64, prefill_chunk=16)
    asked = dataclasses.replace(on_gpu, draft_weights=str(folders / kind))
    plain = Engine.plan(folders / "main", on_gpu, gpu_memory=10**11).devices[0]
    device = Engine.plan(folders / "main", asked, gpu_memory=10**11).devices[0]
    assert device.weight_bytes > plain.weight_bytes
    # The logits of up to seven drafts.
    assert device.state_bytes - plain.state_bytes > 4 * 7 * 256


def test_a_classic_module_makes_more_drafts_than_it_was_trained_for(folders: Path) -> None:
    """Trained for one, it takes the memory of seven whatever is asked."""
    asked = EngineConfig(max_context=64, draft_weights=str(folders / "classic"))
    few, many = (
        Engine.plan(folders / "main", dataclasses.replace(asked, draft_tokens=count), 10**11)
        for count in (1, 7)
    )
    assert many.devices == few.devices


def test_weights_without_a_module_make_no_folder(tmp_path: Path) -> None:
    weights = synthetic_weights(ModelConfig.from_dict(raw_config(None)), "bf16", 1, lambda _: CPU)
    with pytest.raises(UserError, match=r"^weights: found no mtp\.\* parameters, expected"):
        write_draft(tmp_path / "draft", raw_config(None), "bf16", weights)
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("kind", ["classic", "dspark"])
def test_several_gpus_take_a_copy_of_the_embedding(kind: MtpKind) -> None:
    config = ModelConfig.from_dict(raw_config(kind))
    gpus = [torch.device("cuda", index) for index in range(2)]
    shown = (kind, 1 if kind == "classic" else 3)
    layers = config.num_hidden_layers
    one, two = (
        draft_bytes(config, SETTINGS, shown, True, Placement.pipeline([1] * layers, gpus[:count]))
        for count in (1, 2)
    )
    assert two - one == 2 * config.vocab_size * config.hidden_size


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_that_a_module_has_on_its_device_is_counted(ranks: int) -> None:
    config = ModelConfig.from_dict(raw_config("dspark"))
    state = DraftState.allocate(
        config, 3, RowFormat.KV_FP8, torch.bfloat16, CPU, keeps_streams=False
    )
    memory = DraftMemory.allocate(config, state, [CPU], 3, torch.bfloat16, ranks)
    on_host = memory.ring_3R
    there = [*memory.inputs.values(), *tensors_in(memory)]
    assert memory.nbytes == sum(one.nbytes for one in there if one is not on_host)


def test_a_module_needs_its_layers_on_the_last_device(folders: Path) -> None:
    asked = EngineConfig(
        max_context=64,
        prefill_chunk=16,
        gpus=2,
        parallel="round-robin",
        draft_weights=str(folders / "dspark"),
    )
    with pytest.raises(
        UserError, match=r"EngineConfig.gpus: found layer 2, which the draft module"
    ):
        Engine.plan(folders / "main", asked, gpu_memory=10**11)


def test_a_weight_that_the_engine_is_not_given_is_named() -> None:
    config = ModelConfig.from_dict(raw_config("dspark"))
    weights = dict(synthetic_weights(config, "bf16", 1, lambda _: CPU, "dspark"))
    del weights["mtp.1.attn.wkv.weight"]
    placement = Placement.of_layers((CPU,) * config.num_hidden_layers)
    with pytest.raises(UserError, match=r"mtp\.1\.attn\.wkv\.weight: found no such weight"):
        Engine(config, SETTINGS, weights, placement)


def test_keys_that_do_not_fit_the_weights_are_named() -> None:
    config = ModelConfig.from_dict(raw_config("dspark"))
    assert config.dspark is not None
    weights = synthetic_weights(config, "bf16", 1, lambda _: CPU, "dspark")
    placement = Placement.of_layers((CPU,) * config.num_hidden_layers)
    wide = dataclasses.replace(config.dspark, block_size=9)
    unknown = dataclasses.replace(config.dspark, noise_token_id=config.vocab_size)
    for keys, message in (
        (None, "dspark_block_size: found none, expected the dspark_* keys"),
        (wide, "dspark_block_size: found 9, expected at most 8"),
        (unknown, f"dspark_noise_token_id: found {config.vocab_size}, expected a token id below"),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(message)}"):
            Engine(dataclasses.replace(config, dspark=keys), SETTINGS, weights, placement)


@pytest.mark.parametrize("kind", ["classic", "dspark"])
def test_ranks_load_a_module_of_another_folder(
    kind: MtpKind, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of the torch ops, both on the CPU."""
    monkeypatch.setattr("dsv4.opened_checkpoint.engine_devices", lambda *_: (CPU, CPU))
    ranks = dataclasses.replace(SETTINGS, gpus=2, parallel="tensor")
    engine = Engine.load(
        folders / "main", dataclasses.replace(ranks, draft_weights=str(folders / kind))
    )
    assert len(engine.draft_modules) == 2
    plain = Engine.load(folders / "main", ranks)
    greedy = SamplingParams(temperature=0)
    found, text = (
        list(one.generate(random_ids(9), 8, greedy, frozenset())) for one in (engine, plain)
    )
    assert found == text
    assert engine.last_run is not None
    assert engine.last_run.drafts is not None
    assert engine.last_run.drafts.drafted[0] > 0
