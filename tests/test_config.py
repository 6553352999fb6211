"""``config.json`` in both dialects, and everything that is refused."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from dsv4.checkpoint import tiny_config
from dsv4.config import ModelConfig, Yarn
from dsv4.errors import UserError
from tests.hf_config import hf_config
from tests.releases import RELEASES


def test_both_dialects_give_the_same_config() -> None:
    assert ModelConfig.from_dict(hf_config()) == ModelConfig.from_dict(tiny_config())


@pytest.mark.parametrize("dialect", [tiny_config, hf_config])
def test_the_two_eps_are_not_exchanged(dialect: Callable[..., dict[str, Any]]) -> None:
    """Both are 1e-6 in the published configurations."""
    config = ModelConfig.from_dict(dialect(hc_eps=1e-3, rms_norm_eps=1e-5))
    assert (config.hc_eps, config.rms_norm_eps) == (1e-3, 1e-5)


@pytest.mark.parametrize("dialect", [tiny_config, hf_config])
def test_turns_of_yarn_default_to_the_published_ones(
    dialect: Callable[..., dict[str, Any]],
) -> None:
    raw = dialect()
    scaling = raw["rope_scaling"] if "rope_scaling" in raw else raw["rope_parameters"]["compress"]
    for name in ("beta_fast", "beta_slow"):
        del scaling[name]
    yarn = ModelConfig.from_dict(raw).yarn
    assert yarn is not None
    assert (yarn.beta_fast, yarn.beta_slow) == (32.0, 1.0)


def test_published_pro_config() -> None:
    config = ModelConfig.from_dict(RELEASES["pro_apr"].raw_config)
    assert len(config.compress_ratios) == config.num_hidden_layers == 61
    assert [config.compress_ratios.count(ratio) for ratio in (0, 4, 128)] == [0, 30, 31]
    assert config.hash_layers == (True,) * 3 + (False,) * 58
    assert config.yarn == Yarn(
        factor=16.0, original_max_position_embeddings=65536, beta_fast=32.0, beta_slow=1.0
    )
    assert (config.rope_theta, config.compress_rope_theta) == (10000.0, 160000.0)


def test_published_flash_layer_kinds() -> None:
    ratios = ModelConfig.from_dict(RELEASES["flash_apr"].raw_config).compress_ratios
    assert [ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]


def test_dspark_keys_and_their_longer_ratio_tail() -> None:
    config = ModelConfig.from_dict(RELEASES["flash_0731"].raw_config)
    assert config.dspark is not None
    assert config.dspark.target_layer_ids == (40, 41, 42)
    assert ModelConfig.from_dict(RELEASES["flash_apr"].raw_config).dspark is None


def test_geometry_comes_from_the_file_and_not_from_the_model_name() -> None:
    config = ModelConfig.from_dict(tiny_config(compress_ratios=[128, 0, 0, 4], num_hash_layers=0))
    assert config.compress_ratios == (128, 0, 0, 4)
    assert config.hash_layers == (False,) * 4


def test_several_end_of_sequence_tokens() -> None:
    assert ModelConfig.from_dict(tiny_config(eos_token_id=[0, 7])).eos_token_ids == (0, 7)


@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim", "attention_factor"])
def test_spec11_a3_a_scaled_yarn_is_refused(key: str) -> None:
    scaling = {**tiny_config()["rope_scaling"], key: 1.277}
    with pytest.raises(UserError, match=rf"rope_scaling: {key}: found 1.277, expected 1.0"):
        ModelConfig.from_dict(tiny_config(rope_scaling=scaling))
    scaling = {**tiny_config()["rope_scaling"], "truncate": False}
    with pytest.raises(UserError, match=r"rope_scaling: truncate: found False, expected true"):
        ModelConfig.from_dict(tiny_config(rope_scaling=scaling))
    raw = hf_config()
    raw["rope_parameters"]["compress"][key] = 1.277
    with pytest.raises(UserError, match=f"{key}: found 1.277"):
        ModelConfig.from_dict(raw)


def test_a_yarn_whose_ramp_runs_backwards_is_refused() -> None:
    scaling = {**tiny_config()["rope_scaling"], "beta_fast": 1, "beta_slow": 32}
    expected = "rope_scaling: beta_fast: found 1.0, expected at least beta_slow, 32"
    with pytest.raises(UserError, match=expected):
        ModelConfig.from_dict(tiny_config(rope_scaling=scaling))


def test_a_model_without_yarn_says_so() -> None:
    assert ModelConfig.from_dict(tiny_config(rope_scaling={"type": "default"})).yarn is None
    expected = r"rope_scaling: found {'factor': 16}, expected an object with the type 'yarn', or "
    with pytest.raises(UserError, match=expected):
        ModelConfig.from_dict(tiny_config(rope_scaling={"factor": 16}))
    raw = hf_config()
    del raw["rope_parameters"]["compress"]
    with pytest.raises(UserError, match=r"rope_scaling: found {'main': .*expected an object with"):
        ModelConfig.from_dict({**raw, "compress_rope_theta": 160000})


def test_spec11_a2_yarn_on_the_main_table_is_refused() -> None:
    raw = hf_config()
    raw["rope_parameters"]["main"]["rope_type"] = "yarn"
    with pytest.raises(UserError, match="rope_type: found 'yarn', expected 'default'"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    "model_type", ["deepseek_v41", "deepseek_v3", "deepseek_v32", "llama", None, 4]
)
def test_other_models_are_refused_by_name(model_type: object) -> None:
    with pytest.raises(
        UserError, match=r"model_type: found .*, expected 'deepseek_v4' \(V3, V4.1 and other"
    ):
        ModelConfig.from_dict(tiny_config(model_type=model_type))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scoring_func", "sigmoid", "expected 'sqrtsoftplus'"),
        ("num_key_value_heads", 8, "expected 1"),
        ("n_shared_experts", 2, "expected 1"),
        *((key, True, "expected False") for key in ("tie_word_embeddings", "attention_bias")),
        ("mlp_bias", True, "mlp_bias: found True, expected False"),
        ("topk_method", "greedy", "expected 'noaux_tc'"),
        ("norm_topk_prob", False, "expected True"),
        ("hidden_act", "gelu", "expected 'silu'"),
        ("num_hidden_layers", 0, "an integer from 1"),
        ("num_hidden_layers", True, "an integer from 1"),
        ("hidden_size", "128", "an integer from 1"),
        ("rms_norm_eps", float("nan"), "a number above 0"),
        ("rms_norm_eps", 0, "a number above 0"),
        ("rms_norm_eps", True, "a number above 0"),
        ("o_groups", 3, "a divisor of num_attention_heads 4"),
        ("qk_rope_head_dim", 63, "an even number"),
        ("index_head_dim", 32, "an even number from 2 to index_head_dim 32"),
        ("index_head_dim", 96, "a power of two"),
        ("num_experts_per_tok", 9, "at most 8 experts"),
        ("compress_ratios", [0, 4, 128], "one entry for each of the 4 layers"),
        ("compress_ratios", "0000", "found '0000', expected a list with one entry for each"),
        ("compress_ratios", [0, 4, 128, 4, 4], "only zeros after the main layers"),
        ("compress_ratios", [0, 4, 128, 2], "expected 0, 4 or 128"),
        ("compress_ratios", [0, 4.0, 128, 4], "expected 0, 4 or 128"),
        ("compress_ratios", [False, 4, 128, 4], "expected 0, 4 or 128"),
        ("compress_ratios", [0, [4], 128, 4], "expected 0, 4 or 128"),
        ("num_hash_layers", 5, "an integer from 0 to 4"),
        ("bos_token_id", 256, "ids below vocab_size 256"),
        ("eos_token_id", 256, "ids below vocab_size 256"),
        ("eos_token_id", ["1"], "a token id"),
        ("eos_token_id", [-1], "a token id"),
        ("eos_token_id", [1, True], "a token id"),
        ("rope_scaling", {"type": "linear"}, "expected 'yarn' or 'default'"),
        ("rope_scaling", [1], "expected an object"),
    ],
)
def test_values_this_architecture_does_not_have_are_refused(
    key: str, value: object, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ModelConfig.from_dict(tiny_config(**{key: value}), "folder/config.json")
    assert "folder/config.json" in str(caught.value)


@pytest.mark.parametrize("key", ["layer_types", "mlp_layer_types"])
@pytest.mark.parametrize("value", [["moe"], ["x"] * 4, [1] * 4, [["moe"]] * 4, ["moe"] * 5, "moe"])
def test_layer_types_that_do_not_fit_are_refused(key: str, value: object) -> None:
    with pytest.raises(UserError, match=key):
        ModelConfig.from_dict(hf_config(**{key: value}))


def test_rope_part_may_not_vanish() -> None:
    raw = tiny_config(qk_rope_head_dim=None, partial_rotary_factor=0.001)
    with pytest.raises(UserError, match="qk_rope_head_dim: found 0"):
        ModelConfig.from_dict(raw)


def both_dialects(*path: str, value: object) -> dict[str, Any]:
    """The tiny config in both dialects at once, as transformers keeps some keys; one has another
    value.
    """
    raw = {**tiny_config(), **hf_config()}
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return raw


def test_both_dialects_may_say_the_same_and_one_of_them_nothing() -> None:
    for key, value in (("rope_theta", 10000), ("compress_rates", None), ("rope_scaling", {})):
        raw = both_dialects(key, value=value)
        assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(tiny_config()), key


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("compress_ratios", [0, 4, 4, 4], "ratios: layer 2: found 4, expected 128 as in layer_ty"),
        ("num_hash_layers", 1, "layers: layer 1: found False, expected True as in mlp_layer_types"),
        ("layer_types", ["sliding_attention"] * 3, "layer_types: found .3 entries"),
        ("layer_types", ["sliding_attention"] * 5, "layer_types: found 5, expected 4 of sliding"),
        ("compress_rates/compressed_sparse_attention", 8, "attention: found 8, expected 4"),
        ("compress_rates/heavily_compressed_attention", 64, "attention: found 64, expected 128"),
        ("mlp_layer_types", ["dense"] * 4, "mlp_layer_types: found .'dense'"),
        ("rope_theta", 5000, "rope_theta: found 5000, expected 10000 as in rope_parameters: main"),
        ("compress_rope_theta", 10000, "compress_rope_theta: found 10000, expected 160000 as in"),
        ("rope_parameters/main/rope_theta", 1e6, "rope_theta: found 10000.0, expected 1e.06 as in"),
        ("rope_parameters/compress/rope_type", "default", "rope_scaling: found {.*the same as rop"),
        (
            "rope_parameters/compress/factor",
            4,
            "rope_scaling: found {.*the same as rope_parameters",
        ),
        ("rope_parameters", {"rope_type": "default"}, "rope_scaling: found {.*the same as rope_pa"),
        ("rope_scaling/rope_type", "default", "rope_scaling: type: found 'yarn', expected 'defaul"),
        ("rope_scaling", {"factor": 4}, "rope_scaling: found .'factor': 4., expected an object wi"),
        ("rope_parameters/main/type", "yarn", "main: type: found 'yarn', expected 'default'"),
        (
            "partial_rotary_factor",
            0.25,
            "json: partial_rotary_factor: found 0.25, expected 0.5, 64",
        ),
        ("qk_rope_head_dim", 32, "partial_rotary_factor: found 0.5, expected 0.25, 32 of 128"),
        (
            "rope_parameters/main/partial_rotary_factor",
            1,
            "main: partial_rotary_factor: found 1.0, expected 0.5, 64 of 128 values",
        ),
    ],
)
def test_keys_of_which_the_dialects_say_different_things_are_refused(
    path: str, value: object, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig.from_dict(both_dialects(*path.split("/"), value=value))


@pytest.mark.parametrize("missing", [key for key in tiny_config() if key != "architectures"])
@pytest.mark.parametrize("is_null", [False, True])
def test_a_missing_key_or_null_has_a_documented_default_or_is_named(
    missing: str, is_null: bool
) -> None:
    raw = tiny_config()
    del raw[missing]
    if is_null:
        raw[missing] = None
    defaults = {"bos_token_id": None, "eos_token_ids": (), "num_nextn_predict_layers": 0}
    field = "eos_token_ids" if missing == "eos_token_id" else missing
    optional = (
        "topk_method",
        "norm_topk_prob",
        "hidden_act",
        "n_shared_experts",
        "num_key_value_heads",
    )
    if missing in (*optional, "scoring_func", "attention_bias", "tie_word_embeddings"):
        assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(tiny_config())
    elif field in defaults:
        expected = dataclasses.replace(
            ModelConfig.from_dict(tiny_config()), **{field: defaults[field]}
        )
        assert ModelConfig.from_dict(raw) == expected
    else:
        with pytest.raises(UserError, match=f"{missing}|partial_rotary_factor"):
            ModelConfig.from_dict(raw)


@pytest.mark.parametrize("raw", [None, 5, "config.json", [1]])
def test_what_is_no_json_object_is_named(raw: Any) -> None:
    with pytest.raises(UserError, match="config.json: found .*, expected an object"):
        ModelConfig.from_dict(raw)


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig.from_dict(tiny_config()).hidden_size = 1  # type: ignore[misc]
