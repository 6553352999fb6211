"""Known faults of position embeddings, norms, routing and experts: each moves the logits away from
transformers'.

The fixture checks that the model without a fault agrees; every test puts one fault in and sees it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import ModelConfig
from dsv4.ops import TORCH, Ops
from dsv4.ops.compressor import compress
from dsv4.ops.kv_write import kv_write
from dsv4.ops.moe import Mixture, expert_sum
from dsv4.ops.norm import rms_norm
from dsv4.ops.rope import layer_inv_freq, query_rope, rope
from dsv4.ops.router import Router, route
from tests.model.conftest import SavedOracle
from tests.model.parts import with_parts

SWA = 0
COMPRESSED = 4


def window_table(choose: Callable[[Tensor], Tensor]) -> Ops:
    """Queries, window keys and the inverse rotation with another table than compressed entries."""

    def attend(
        q: Any, keys: Any, selected: Any, sink: Any, positions: Any, inv_freq: Any
    ) -> Tensor:
        return TORCH.sparse_attention(q, keys, selected, sink, positions, choose(inv_freq))

    def write(kv: Any, norm: Any, positions: Any, inv_freq: Any, ring: Any, eps: Any) -> None:
        kv_write(kv, norm, positions, choose(inv_freq), ring, eps)

    def rotate(q: Any, positions: Any, inv_freq: Any, eps: float) -> Tensor:
        return query_rope(q, positions, choose(inv_freq), eps)

    return with_parts(
        dataclasses.replace(TORCH, sparse_attention=attend), kv_write=write, query_rope=rotate
    )


def weighting(change: Callable[[Tensor, Router], Tensor]) -> Ops:
    """Experts with other routing weights than the router gives."""

    def moe(
        x: Any, tokens: Any, router: Router, experts: Any, shared: Any, limit: float
    ) -> Mixture:
        ids_TP, weights_TP = route(x, tokens, router)
        changed_TP = change(weights_TP, router)
        y_TE = expert_sum(x, ids_TP, changed_TP, experts, shared, limit)
        return Mixture(y_TE, ids_TP, changed_TP)

    return dataclasses.replace(TORCH, moe=moe)


@pytest.fixture
def tables(saved_oracle: SavedOracle) -> tuple[Tensor, Tensor]:
    """The main table and the compress table."""
    config = ModelConfig.from_folder(saved_oracle.folder)
    return layer_inv_freq(config, SWA), layer_inv_freq(config, COMPRESSED)


def test_spec11_a01_lesson_02_window_keys_turned_with_the_main_table_in_compressed_layers(
    saved_oracle: SavedOracle, tables: tuple[Tensor, Tensor]
) -> None:
    assert saved_oracle.clearly_differs(window_table(lambda _: tables[0]))


def test_spec11_a02_window_layers_turned_with_the_compress_table(
    saved_oracle: SavedOracle, tables: tuple[Tensor, Tensor]
) -> None:
    main, compressed = tables
    assert saved_oracle.clearly_differs(
        window_table(lambda table: compressed if torch.equal(table, main) else table)
    )


def test_lesson_03_yarn_on_the_main_table(
    saved_oracle: SavedOracle, tables: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_folder(saved_oracle.folder)
    yarn_main = layer_inv_freq(
        dataclasses.replace(config, compress_rope_theta=config.rope_theta), COMPRESSED
    )
    assert not torch.equal(yarn_main, tables[0])

    def yarn_everywhere(config: ModelConfig, ratio: int) -> Tensor:
        return yarn_main if ratio == SWA else layer_inv_freq(config, ratio)

    monkeypatch.setattr("dsv4.layers.attention.layer_inv_freq", yarn_everywhere)
    assert saved_oracle.clearly_differs()


def test_spec11_a03_mscale_in_the_rotation(saved_oracle: SavedOracle) -> None:
    def scaled(q_THD: Tensor, positions_T: Tensor, inv_freq: Tensor, eps: float) -> Tensor:
        rotated = query_rope(q_THD, positions_T, inv_freq, eps)
        width = 2 * inv_freq.shape[0]
        return torch.cat((rotated[..., :-width], 1.277 * rotated[..., -width:]), dim=-1)

    assert saved_oracle.clearly_differs(with_parts(query_rope=scaled))


def test_spec11_a03_no_inverse_rotation_of_the_output(saved_oracle: SavedOracle) -> None:
    def attend(
        q: Any, keys: Any, selected: Any, sink: Any, positions: Any, inv_freq: Any
    ) -> Tensor:
        return rope(
            TORCH.sparse_attention(q, keys, selected, sink, positions, inv_freq),
            positions,
            inv_freq,
        )

    assert saved_oracle.clearly_differs(dataclasses.replace(TORCH, sparse_attention=attend))


def test_spec11_a04_one_shared_position_for_all_compressed_entries(
    saved_oracle: SavedOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(x: Tensor, positions_T: Tensor, inv_freq: Tensor) -> Tensor:
        return rope(x, positions_T[-1].expand_as(positions_T), inv_freq)

    monkeypatch.setattr("dsv4.ops.compressor.rope", shared)
    assert saved_oracle.clearly_differs()


def test_spec11_a05_half_split_rotation_in_the_indexer(
    saved_oracle: SavedOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_width = ModelConfig.from_folder(saved_oracle.folder).index_head_dim

    def half_split(x: Tensor, positions_T: Tensor, inv_freq: Tensor) -> Tensor:
        if x.shape[-1] != index_width:
            return rope(x, positions_T, inv_freq)
        pairs = 2 * inv_freq.shape[0]
        interleaved = x[..., -pairs:].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        rotated = (
            rope(interleaved, positions_T, inv_freq)
            .unflatten(-1, (-1, 2))
            .transpose(-1, -2)
            .flatten(-2)
        )
        return torch.cat((x[..., :-pairs], rotated), dim=-1)

    monkeypatch.setattr("dsv4.ops.indexer.rope", half_split)
    monkeypatch.setattr("dsv4.ops.compressor.rope", half_split)
    assert saved_oracle.clearly_differs()


def test_lesson_01_queries_normalised_over_all_heads_at_once(saved_oracle: SavedOracle) -> None:
    def over_all_heads(q_THD: Tensor, positions_T: Tensor, inv_freq: Tensor, eps: float) -> Tensor:
        return rope(rms_norm(q_THD.flatten(1), None, eps).view_as(q_THD), positions_T, inv_freq)

    assert saved_oracle.clearly_differs(with_parts(query_rope=over_all_heads))


def test_lesson_04_index_queries_and_keys_without_rotation(
    saved_oracle: SavedOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_width = ModelConfig.from_folder(saved_oracle.folder).index_head_dim

    def not_in_the_indexer(x: Tensor, positions_T: Tensor, inv_freq: Tensor) -> Tensor:
        return x if x.shape[-1] == index_width else rope(x, positions_T, inv_freq)

    monkeypatch.setattr("dsv4.ops.indexer.rope", not_in_the_indexer)
    monkeypatch.setattr("dsv4.ops.compressor.rope", not_in_the_indexer)
    assert saved_oracle.clearly_differs()


def test_lesson_05_positional_bias_added_to_the_content(saved_oracle: SavedOracle) -> None:
    def biased(
        kv_TW: Tensor, score_TW: Tensor, positions_T: Tensor, weights: Any, state: Any
    ) -> None:
        compress(
            kv_TW + weights.ape[positions_T % weights.ratio], score_TW, positions_T, weights, state
        )

    assert saved_oracle.clearly_differs(with_parts(compress=biased))


def test_lesson_06_hash_layers_with_equal_weights(saved_oracle: SavedOracle) -> None:
    def table_only(weights_TP: Tensor, router: Router) -> Tensor:
        return (
            weights_TP.mean(-1, keepdim=True).expand_as(weights_TP) if router.hashed else weights_TP
        )

    assert saved_oracle.clearly_differs(weighting(table_only))


def test_spec11_d24_d25_d26_experts_without_the_clamp(saved_oracle: SavedOracle) -> None:
    def shared_unclamped(
        x: Any, tokens: Any, router: Router, experts: Any, shared: Any, limit: float
    ) -> Mixture:
        right = TORCH.moe(x, tokens, router, experts, shared, limit)
        without_routed = dataclasses.replace(router, scaling=0.0)
        clamped, free = (
            TORCH.moe(x, tokens, without_routed, experts, shared, bound) for bound in (limit, 1e9)
        )
        return right._replace(y_TE=right.y_TE - clamped.y_TE + free.y_TE)

    def unclamped(x: Any, tokens: Any, router: Any, experts: Any, shared: Any, _: float) -> Mixture:
        return TORCH.moe(x, tokens, router, experts, shared, 1e9)

    for moe in (shared_unclamped, unclamped):
        assert saved_oracle.clearly_differs(dataclasses.replace(TORCH, moe=moe))


@pytest.mark.parametrize("times", [0, 2])
def test_spec11_d28_routed_scaling_factor_missing_or_twice(
    times: int, saved_oracle: SavedOracle
) -> None:
    factor = ModelConfig.from_folder(saved_oracle.folder).routed_scaling_factor

    def scaled(weights_TP: Tensor, router: Router) -> Tensor:
        return weights_TP if router.hashed else weights_TP * factor ** (times - 1)

    assert saved_oracle.clearly_differs(weighting(scaled))


def test_spec11_f41_ffn_norm_applied_twice(saved_oracle: SavedOracle) -> None:
    def twice(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        streams_TME, x_TE, post_TM, comb_TMM = TORCH.hc_seam(*arguments)
        *_, weights, norm_weight = arguments
        return streams_TME, rms_norm(x_TE, norm_weight, weights.norm_eps), post_TM, comb_TMM

    assert saved_oracle.clearly_differs(dataclasses.replace(TORCH, hc_seam=twice))
