"""What launchers refuse of tensors, each with what was found and what was expected."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4.launch.checks import expect, expect_rows

WHOLE = torch.empty(4, 8, dtype=torch.bfloat16)
ROWS = torch.empty(4, 16, dtype=torch.bfloat16)[:, :8]


@pytest.mark.parametrize("check", [expect, expect_rows])
@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (WHOLE.float(), "torch.float32 [4, 8]"),
        (WHOLE[:3], "torch.bfloat16 [3, 8]"),
        (WHOLE[None], "torch.bfloat16 [1, 4, 8]"),
        (WHOLE[:3].float(), "torch.float32 [3, 8]"),
    ],
)
def test_another_dtype_or_shape_is_refused(
    check: Callable[..., None], tensor: Tensor, found: str
) -> None:
    message = f"x: found {found}, expected torch.bfloat16 [4, 8]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check("x", tensor, torch.bfloat16, (4, 8))


@pytest.mark.parametrize("check", [expect, expect_rows])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(8, 4, dtype=torch.bfloat16).T,
        torch.empty(4, 16, dtype=torch.bfloat16)[:, ::2],
        torch.empty(4, 1, dtype=torch.bfloat16).expand(4, 8),
    ],
)
def test_rows_with_gaps_are_refused(check: Callable[..., None], tensor: Tensor) -> None:
    message = f"x: found strides {tensor.stride()}, expected rows without gaps"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check("x", tensor, torch.bfloat16, (4, 8))


def test_rows_apart_are_rows_and_not_contiguous() -> None:
    expect_rows("x", ROWS, torch.bfloat16, (4, 8))
    with pytest.raises(ValueError, match=r"^x: found strides \(16, 1\), expected contiguous$"):
        expect("x", ROWS, torch.bfloat16, (4, 8))


@pytest.mark.parametrize("check", [expect, expect_rows])
@pytest.mark.parametrize("tensor", [WHOLE, torch.empty(0, 4).T, torch.empty(())])
def test_what_is_whole_passes_though_it_be_nothing_or_one_value(
    check: Callable[..., None], tensor: Tensor
) -> None:
    check("x", tensor, tensor.dtype, tuple(tensor.shape))
