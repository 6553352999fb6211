"""The rename table, against the names of the published checkpoints and against what transformers
has.
"""

import time

import pytest

from dsv4.checkpoint import Dialect
from dsv4.checkpoint.names import detect_dialect, from_native, to_native
from dsv4.errors import UserError
from tests.releases import RELEASES, recorded_tensors


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("release", list(RELEASES))
def test_every_published_name_survives_the_way_there_and_back(
    release: str, dialect: Dialect
) -> None:
    names = list(recorded_tensors(release))
    renamed = [from_native(name, dialect) for name in names]
    assert len(set(renamed)) == len(names)
    assert [to_native(name, dialect) for name in renamed] == names
    assert detect_dialect(renamed, "test") is dialect


@pytest.mark.parametrize(
    ("native", "hf"),
    [
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
        ("norm.weight", "model.norm.weight"),
        ("hc_head_base", "model.hc_head.hc_base"),
        ("layers.3.attn_norm.weight", "model.layers.3.input_layernorm.weight"),
        ("layers.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
        ("layers.3.hc_attn_fn", "model.layers.3.attn_hc.fn"),
        ("layers.3.hc_ffn_scale", "model.layers.3.ffn_hc.scale"),
        ("layers.3.attn.attn_sink", "model.layers.3.self_attn.sinks"),
        ("layers.3.attn.wq_a.scale", "model.layers.3.self_attn.q_a_proj.weight_scale_inv"),
        ("layers.3.attn.wq_b.weight_scale_2", "model.layers.3.self_attn.q_b_proj.weight_scale_2"),
        ("layers.3.attn.wkv.input_scale", "model.layers.3.self_attn.kv_proj.input_scale"),
        ("layers.3.attn.kv_norm.weight", "model.layers.3.self_attn.kv_norm.weight"),
        (
            "layers.3.attn.compressor.norm.weight",
            "model.layers.3.self_attn.compressor.kv_norm.weight",
        ),
        ("layers.3.attn.compressor.ape", "model.layers.3.self_attn.compressor.position_bias"),
        (
            "layers.3.attn.indexer.compressor.wkv.weight",
            "model.layers.3.self_attn.compressor.indexer.kv_proj.weight",
        ),
        (
            "layers.3.attn.indexer.wq_b.weight",
            "model.layers.3.self_attn.compressor.indexer.q_b_proj.weight",
        ),
        ("layers.3.ffn.gate.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
        (
            "layers.3.ffn.experts.17.w1.weight_scale",
            "model.layers.3.mlp.experts.17.gate_proj.weight_scale",
        ),
        ("layers.3.ffn.experts.17.w2.weight", "model.layers.3.mlp.experts.17.down_proj.weight"),
        (
            "layers.3.ffn.experts.17.w3.scale",
            "model.layers.3.mlp.experts.17.up_proj.weight_scale_inv",
        ),
        ("layers.3.ffn.experts.w13.weight", "model.layers.3.mlp.experts.gate_up_proj"),
        ("layers.3.ffn.experts.w2.scale", "model.layers.3.mlp.experts.down_proj_scale_inv"),
        (
            "layers.3.ffn.shared_experts.w3.weight",
            "model.layers.3.mlp.shared_experts.up_proj.weight",
        ),
        ("mtp.0.attn.wq_a.scale", "mtp.0.attn.wq_a.scale"),
    ],
)
def test_hf_names(native: str, hf: str) -> None:
    assert from_native(native, Dialect.HF) == hf
    assert to_native(hf, Dialect.HF) == native


@pytest.mark.parametrize(
    ("native", "hybrid"),
    [
        ("head.weight", "head.weight"),
        ("embed.weight", "model.embed_tokens.weight"),
        ("hc_head_fn", "model.hc_head.hc_fn"),
        ("layers.0.attn.kv_norm.weight", "model.layers.0.attn.norm.weight"),
        ("layers.0.attn.q_norm.weight", "model.layers.0.attn.q_norm.weight"),
        ("layers.0.attn.compressor.norm.weight", "model.layers.0.attn.compressor.norm.weight"),
        ("layers.0.ffn.experts.4.w3.weight", "model.layers.0.ffn.experts.4.w3.weight"),
        ("layers.0.hc_attn_fn", "model.layers.0.hc_attn_fn"),
    ],
)
def test_hybrid_names_of_save_pretrained(native: str, hybrid: str) -> None:
    assert from_native(native, Dialect.HYBRID) == hybrid
    assert to_native(hybrid, Dialect.HYBRID) == native


def test_older_hf_name_of_the_indexer_weights_is_understood() -> None:
    older = "model.layers.2.self_attn.compressor.indexer.weights_proj.weight"
    assert to_native(older, Dialect.HF) == "layers.2.attn.indexer.weights_proj.weight"


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("model.layers.0.self_attn.unknown.weight", Dialect.HF),
        ("model.layers.0.attn.wq_a.weight", Dialect.HF),
        ("lm_head.weight", Dialect.HYBRID),
        ("model.layers.0.attn.kv_norm.weight", Dialect.HYBRID),
        ("model.layers.0.self_attn.q_a_proj.weight", Dialect.HYBRID),
        ("layers.x.attn.wq_a.weight", Dialect.NATIVE),
        ("lm_head.weight", Dialect.NATIVE),
        ("head.weight", Dialect.HF),
        ("", Dialect.NATIVE),
        ("model.layers.0.", Dialect.HF),
    ],
)
def test_names_of_other_dialects_are_unknown(name: str, dialect: Dialect) -> None:
    assert to_native(name, dialect) is None


def test_mixed_dialects_are_reported_with_examples() -> None:
    with pytest.raises(
        UserError,
        match="different dialects: .*layers.0.attn.wq_a.weight .native.*q_a_proj.weight .hf.",
    ):
        detect_dialect(
            ["layers.0.attn.wq_a.weight", "model.layers.1.self_attn.q_a_proj.weight"], "test"
        )


def test_examples_of_a_mixture_say_every_dialect_they_may_be_of() -> None:
    with pytest.raises(
        UserError, match=r"embed.weight \(native\), model.norm.weight \(hf/hybrid\), expected one"
    ):
        detect_dialect(["embed.weight", "model.norm.weight"], "test")


def test_folders_without_any_known_name_are_refused() -> None:
    with pytest.raises(UserError, match="no DeepSeek-V4 tensor name"):
        detect_dialect(["transformer.h.0.weight", "mtp.0.e_proj.weight"], "test")


def test_spec11_e37_shared_expert_rows_of_a_broken_resave_are_named() -> None:
    broken = "model.layers.0.mlp.shared_experts.3.w2.weight.weight"
    with pytest.raises(
        UserError, match="shared_experts.3.w2.weight.weight, a known damage of re-saved checkpoints"
    ):
        detect_dialect(["model.norm.weight", broken], "test")


def test_a_doubled_ending_elsewhere_is_left_for_the_comparison() -> None:
    doubled = "layers.0.ffn.shared_experts.w2.weight.weight"
    assert detect_dialect(["embed.weight", doubled], "test") is Dialect.NATIVE


def test_a_name_as_long_as_a_header_is_read_once() -> None:
    started = time.monotonic()
    name = "shared_experts.0." * 40_000
    assert detect_dialect([name, "embed.weight"], "test") is Dialect.NATIVE
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("dialect", [Dialect.HF, Dialect.HYBRID])
@pytest.mark.parametrize("inside", ["attn.wq_a.weight", "self_attn.q_a_proj.weight"])
def test_layers_outside_the_model_have_no_name_but_a_native_one(
    dialect: Dialect, inside: str
) -> None:
    assert to_native(f"layers.0.{inside}", dialect) is None
