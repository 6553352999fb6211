"""What the attention layers hand to their ops, against the formulas of docs/model.md in float64."""

import dataclasses

import pytest
import torch
from torch import Tensor

from dsv4.caches.state import DecodeState
from dsv4.engine_config import EngineConfig
from dsv4.layers.attention import Attention
from dsv4.layers.weights import WeightReader
from dsv4.ops import TORCH_PACKING
from dsv4.ops.rope import layer_inv_freq
from tests.layers.recorder import BOUND, CONFIG, RATIOS, TOKENS, WEIGHTS, Recorder, matrix, vector
from tests.ops.cases import assert_near, exact_rope, exact_sylvester, normal

START = 3


def exact_norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps) ** -0.5


def exact_c_q(x_TE: Tensor, layer: int) -> Tensor:
    prefix = f"layers.{layer}.attn"
    return exact_norm(x_TE.double() @ matrix(f"{prefix}.wq_a.weight").T) * vector(
        f"{prefix}.q_norm.weight"
    )


@dataclasses.dataclass
class AttentionRun:
    """One attention layer on tokens 3 to 11 after tokens 0 to 2, recorded."""

    x_TE: Tensor
    out_TE: Tensor
    recorder: Recorder


def run_attention(layer: int) -> AttentionRun:
    recorder = Recorder()
    reader = WeightReader(WEIGHTS, TORCH_PACKING).below(f"layers.{layer}.attn")
    attention = Attention.build(CONFIG, reader, RATIOS[layer], torch.float32)
    ops = recorder.table()
    engine = EngineConfig(kv_dtype="bf16", index_dtype="bf16", compute_dtype="float32")
    state = DecodeState.allocate(CONFIG, engine, 64, (torch.device("cpu"),) * 3).layers[layer]
    x_TE = normal(START + TOKENS, CONFIG.hidden_size, seed=50)
    attention.attend(ops, attention.project(ops, x_TE[:START]), torch.arange(START), state)
    recorder.calls.clear()
    projections = attention.project(ops, x_TE[START:])
    attended = attention.attend(ops, projections, torch.arange(START, START + TOKENS), state)
    return AttentionRun(x_TE[START:], attended.y_TE, recorder)


@pytest.fixture(params=range(len(RATIOS)), ids=["window", "csa", "hca"])
def layer(request: pytest.FixtureRequest) -> int:
    return request.param


def test_lesson_01_attention_gets_queries_normalised_per_head(layer: int) -> None:
    run = run_attention(layer)
    ((q_THD, *_),) = run.recorder.arguments("sparse_attention")
    raw = exact_c_q(run.x_TE, layer) @ matrix(f"layers.{layer}.attn.wq_b.weight").T
    heads = exact_norm(raw.unflatten(1, (CONFIG.num_attention_heads, CONFIG.head_dim)))
    frequencies = layer_inv_freq(CONFIG, RATIOS[layer])
    exact = torch.stack([exact_rope(head, START + t, frequencies) for t, head in enumerate(heads)])
    assert_near(q_THD, exact, BOUND)


def test_lesson_02_one_table_serves_everything_in_a_layer(layer: int) -> None:
    recorder = run_attention(layer).recorder
    expected = layer_inv_freq(CONFIG, RATIOS[layer])
    ((*_, norm, _, compressions),) = recorder.arguments("prepare_attention")
    used = [norm.inv_freq, *[compression.weights.inv_freq for compression in compressions]]
    used += [arguments[5] for arguments in recorder.arguments("sparse_attention")]
    assert len(used) == {0: 2, 4: 4, 128: 3}[RATIOS[layer]]
    assert all(torch.equal(inv_freq, expected) for inv_freq in used)


def test_lesson_04_index_queries_come_from_c_q_and_both_sides_are_rotated() -> None:
    run = run_attention(1)
    ((q_TID, weight_TI, score_scale, *_),) = run.recorder.arguments("index_select")
    heads = CONFIG.index_n_heads
    width = CONFIG.index_head_dim
    raw = (exact_c_q(run.x_TE, 1) @ matrix("layers.1.attn.indexer.wq_b.weight").T).unflatten(
        1, (heads, width)
    )
    frequencies = layer_inv_freq(CONFIG, 4)
    turned = torch.stack([exact_rope(q, START + t, frequencies) for t, q in enumerate(raw)])
    assert_near(q_TID, turned @ exact_sylvester(width) * width**-0.5, BOUND)
    exact_weight = run.x_TE.double() @ matrix("layers.1.attn.indexer.weights_proj.weight").T
    assert weight_TI.dtype == torch.float32
    assert_near(weight_TI, exact_weight, BOUND)
    assert score_scale == width**-0.5 * heads**-0.5
    ((*_, compressions),) = run.recorder.arguments("prepare_attention")
    assert [compression.weights.rotate_keys for compression in compressions] == [False, True]


@pytest.mark.parametrize("layer", [1, 2], ids=["csa", "hca"])
def test_compressors_read_the_attention_input(layer: int) -> None:
    run = run_attention(layer)
    parts = [f"layers.{layer}.attn.compressor", f"layers.{layer}.attn.indexer.compressor"][
        : 2 if layer == 1 else 1
    ]
    ((_, _, positions_T, *_, compressions),) = run.recorder.arguments("prepare_attention")
    assert positions_T.tolist() == list(range(START, START + TOKENS))
    for prefix, compression in zip(parts, compressions, strict=True):
        products = (("wkv", compression.kv_TW), ("wgate", compression.score_TW))
        for name, product_TW in products:
            assert product_TW.dtype == torch.float32
            assert_near(product_TW, run.x_TE.double() @ matrix(f"{prefix}.{name}.weight").T, BOUND)
        assert compression.weights.ratio == RATIOS[layer]
        assert compression.weights.norm_eps == CONFIG.rms_norm_eps
        assert torch.equal(compression.weights.ape.double(), vector(f"{prefix}.ape"))
        assert torch.equal(compression.weights.norm.double(), vector(f"{prefix}.norm.weight"))


def test_output_heads_are_grouped_contiguously(layer: int) -> None:
    run = run_attention(layer)
    (o_THD,) = run.recorder.results("sparse_attention")
    prefix = f"layers.{layer}.attn"
    groups = CONFIG.o_groups
    wo_a = matrix(f"{prefix}.wo_a.weight").unflatten(0, (groups, -1))
    per_group = CONFIG.num_attention_heads // groups
    low_rank = [
        o_THD[:, per_group * g : per_group * (g + 1)].double().flatten(1) @ wo_a[g].T
        for g in range(groups)
    ]
    assert_near(run.out_TE, torch.cat(low_rank, dim=1) @ matrix(f"{prefix}.wo_b.weight").T, BOUND)


def test_keys_are_written_before_they_are_read_from_the_same_caches(layer: int) -> None:
    """A token sees its own key and the entries and index keys that it completes."""
    recorder = run_attention(layer).recorder
    order = [
        name
        for name, _, _ in recorder.calls
        if name in ("prepare_attention", "index_select", "sparse_attention")
    ]
    assert order == [
        "prepare_attention",
        *["index_select"] * (RATIOS[layer] == 4),
        "sparse_attention",
    ]
    ((*_, ring, compressions),) = recorder.arguments("prepare_attention")
    ((_, keys, *_),) = recorder.arguments("sparse_attention")
    written = [ring, *[compression.state.rows for compression in compressions]]
    read = [keys.ring, *[rows for rows in (keys.compressed,) if rows is not None]]
    read += [arguments[3] for arguments in recorder.arguments("index_select")]
    assert [rows.data.data_ptr() for rows in written] == [rows.data.data_ptr() for rows in read]


def test_window_keys_come_from_the_attention_input(layer: int) -> None:
    run = run_attention(layer)
    ((_, kv_TD, _, norm, *_),) = run.recorder.arguments("prepare_attention")
    assert_near(kv_TD, run.x_TE.double() @ matrix(f"layers.{layer}.attn.wkv.weight").T, BOUND)
    assert torch.equal(norm.kv_norm.double(), vector(f"layers.{layer}.attn.kv_norm.weight"))
    assert norm.eps == CONFIG.rms_norm_eps


def test_spec11_b14_positions_and_indices_are_64_bit(layer: int) -> None:
    """Slot times row bytes passes 2³¹ in long contexts."""
    recorder = run_attention(layer).recorder
    positions = [arguments[2] for arguments in recorder.arguments("prepare_attention")]
    indices = recorder.results("index_select")
    assert {tensor.dtype for tensor in (*positions, *indices)} == {torch.int64}
    engine = EngineConfig()
    state = DecodeState.allocate(CONFIG, engine, 64, (torch.device("cpu"),) * 3)
    assert {position.dtype for position in state.positions_1.values()} == {torch.int64}
