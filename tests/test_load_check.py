"""Native kernels against the portable ones on a model's own weights."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from dsv4 import EngineConfig, ModelConfig, load_check
from dsv4.caches.allocation import COMPUTE_DTYPES
from dsv4.engine_config import ActivationMode
from dsv4.errors import UserError
from dsv4.load_check import checked_table, first_difference, products
from dsv4.model import Transformer
from dsv4.native.random_weights import RandomWeights
from dsv4.ops import TORCH, TORCH_PACKING
from dsv4.ops.linear import grouped_linear, linear_rows
from dsv4.ops.moe import Mixture, moe
from dsv4.ops.tables import CUDA_TABLE, TORCH_TABLE, DirectTable, Table
from dsv4.weights.packed import pack_weight
from dsv4.weights.packed_native import pack_with_native
from dsv4.weights.quant import QuantFormat
from tests.model.tiny import CPU, random_weights, small_config
from tests.native.fakes import failing_linear, table_of, wrong_linear


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig.from_dict(small_config())
    devices = (CPU,) * config.num_hidden_layers
    dtype = COMPUTE_DTYPES["bfloat16"]
    return Transformer.build(config, random_weights(config), TORCH_PACKING, devices, dtype)


def other(**ops: Any) -> DirectTable:
    return DirectTable(TORCH_PACKING, replace(TORCH, **ops))


def wrong_rows(*arguments: Any) -> tuple[Tensor, ...]:
    *products, last = linear_rows(*arguments)
    return (*products, last * 1.05)


def wrong_groups(x_TGK: Tensor, weight: Any) -> Tensor:
    return grouped_linear(x_TGK.flip(1), weight)


def wrong_experts(*arguments: Any) -> Mixture:
    mixture = moe(*arguments)
    return mixture._replace(y_TE=mixture.y_TE * 1.02)


def failing_experts(*arguments: Any) -> Mixture:
    raise RuntimeError("CUDA error: misaligned address\nCompile with another flag")


def experts_apart(*arguments: Any) -> Mixture:
    mixture = moe(*arguments)
    return mixture._replace(y_TE=mixture.y_TE * 1.02)


def normed_rows_apart(*arguments: Any) -> tuple[Tensor, ...]:
    factor = 1.02 if len(arguments) > 2 else 1
    return tuple(rows * factor for rows in linear_rows(*arguments))


def plain_rows_apart(*arguments: Any) -> tuple[Tensor, ...]:
    factor = 1 if len(arguments) > 2 else 1.02
    return tuple(rows * factor for rows in linear_rows(*arguments))


def other_routes(*arguments: Any) -> Mixture:
    mixture = moe(*arguments)
    return mixture._replace(ids_TP=mixture.ids_TP.roll(1, 0))


def test_every_matrix_is_in_a_product(model: Transformer) -> None:
    kinds = [product.kind for product in products(model)]
    assert len(kinds) == 5 * len(model.blocks) + 1
    # SWA, CSA and HCA layers have other input rows, CSA layers other query rows, a hashed router.
    assert len(set(kinds)) == 3 + 2 + 1 + 1 + 2 + 1


def test_the_same_kernels_pass(model: Transformer) -> None:
    assert first_difference(TORCH_TABLE, TORCH_TABLE, model) is None


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (table_of(wrong_linear), "linear f32 [64, 32] on the model's weights: 300 of 19200"),
        (table_of(failing_linear), "weights: CUDA driver error: CUDA_ERROR_INVALID_VALUE at a"),
        (other(linear_rows=wrong_rows), "linear_rows f32 [32, 64], f32 [64, 64] on the model's"),
        (other(grouped_linear=wrong_groups), "grouped_linear f32 [32, 64] on the model's"),
        (other(moe=wrong_experts), "moe f32 [8, 32, 64] on the model's weights"),
        (other(moe=other_routes), "tokens go to other experts"),
        (other(moe=failing_experts), "moe f32 [8, 32, 64] on the model's weights: CUDA error"),
    ],
)
def test_every_op_is_compared(model: Transformer, table: DirectTable, reason: str) -> None:
    told = first_difference(table, TORCH_TABLE, model)
    assert told is not None
    assert reason in told


def test_an_error_is_its_first_line(model: Transformer) -> None:
    told = first_difference(other(moe=failing_experts), TORCH_TABLE, model)
    assert told is not None
    assert told.endswith(": CUDA error: misaligned address")


def test_a_reference_stands_for_the_portable_kernels(model: Transformer) -> None:
    table = other(linear_rows=wrong_rows)
    assert first_difference(replace(table, reference=table), TORCH_TABLE, model) is None
    told = first_difference(replace(TORCH_TABLE, reference=table), TORCH_TABLE, model)
    assert told is not None


@pytest.mark.parametrize(
    ("table", "passes"),
    [
        (other(linear_rows=normed_rows_apart), True),
        (other(linear_rows=plain_rows_apart), False),
        (other(moe=experts_apart), True),
    ],
    ids=["normed rows", "plain rows", "experts"],
)
def test_what_a_reference_rounds_to_codes_may_be_further_apart(
    model: Transformer, table: DirectTable, passes: bool
) -> None:
    """Rows between two computations: those of a norm, and hidden ones of experts."""
    assert first_difference(table, TORCH_TABLE, model) is not None
    rounded = replace(table, reference=TORCH_TABLE)
    assert (first_difference(rounded, TORCH_TABLE, model) is None) is passes


def check(
    table: DirectTable, model: Transformer, caplog: pytest.LogCaptureFixture, required: bool = False
) -> tuple[DirectTable, list[str]]:
    """The table that an engine takes, and the lines of its log."""
    with caplog.at_level(logging.INFO, "dsv4"):
        checked = checked_table(table, model, EngineConfig(require_native=required))
    assert isinstance(checked, DirectTable)
    return checked, caplog.messages


def test_right_kernels_stay_without_a_word(
    model: Transformer, caplog: pytest.LogCaptureFixture
) -> None:
    table = replace(TORCH_TABLE, portable=TORCH_TABLE)
    assert check(table, model, caplog) == (table, [])


def test_wrong_kernels_give_way_with_one_warning(
    model: Transformer, caplog: pytest.LogCaptureFixture
) -> None:
    table = replace(table_of(wrong_linear), portable=TORCH_TABLE)
    checked, told = check(table, model, caplog)
    assert checked is TORCH_TABLE
    assert len(told) == 1
    assert told[0].startswith("no native kernels, the portable ones are used: linear f32 [64, 32]")
    with pytest.raises(UserError, match=r"^EngineConfig.require_native: linear f32 \[64, 32\]"):
        check(table, model, caplog, required=True)


def test_what_was_refused_before_is_told_once(
    model: Transformer, caplog: pytest.LogCaptureFixture
) -> None:
    table = replace(TORCH_TABLE, refused="gemm (small): 12 values are wrong")
    checked, told = check(table, model, caplog)
    assert checked is table
    assert told == [
        "no native kernels, the portable ones are used: gemm (small): 12 values are wrong"
    ]


@pytest.mark.parametrize(
    ("table", "activations", "said"),
    [
        (CUDA_TABLE, "fp8", ", with 16-bit activations"),
        (CUDA_TABLE, "bf16", ""),
        (TORCH_TABLE, "fp8", ""),
    ],
    ids=["rounded", "as they are", "emulated"],
)
def test_activations_that_stay_as_they_are_are_told(
    table: Table,
    activations: ActivationMode,
    said: str,
    model: Transformer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = replace(table, refused="gemm (small): 12 values are wrong")
    checked_table(table, model, EngineConfig(prefill_activations=activations))
    start = f"no native kernels, the portable ones are used{said}: gemm (small)"
    assert caplog.messages[0].startswith(start)


def test_kernels_that_are_chosen_by_values_are_kinds_of_their_own() -> None:
    fp8 = RandomWeights(CPU).weight(QuantFormat.FP8_BLOCK128, 128, 256)
    assert fp8.block_scale is not None
    other_scales = replace(fp8, block_scale=fp8.block_scale.float() * 1.5)
    nvfp4 = RandomWeights(CPU).weight(QuantFormat.NVFP4, 128, 256)
    disguised = RandomWeights(CPU).weight(QuantFormat.NVFP4, 128, 256, disguised=True)
    packed = [
        *(pack_weight(fp8), pack_weight(other_scales), pack_weight(nvfp4)),
        *(pack_with_native(nvfp4, False), pack_with_native(nvfp4, True)),
        *(pack_with_native(disguised, False), pack_with_native(fp8, False)),
    ]
    kinds = [load_check._kind([weight]) for weight in packed]
    # Without a native copy a packed weight is the same with and without a place for one.
    assert len(set(kinds)) == len(kinds) - 1
    assert kinds[2] == kinds[3]
