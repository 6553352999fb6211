"""Op tables under test, shared inputs and error measures of the op tests.

The tests say what an op means, not how ``TORCH`` computes it: an op table that is added to
``BACKENDS`` runs through all of them. Inputs are drawn on the CPU, so that every backend sees the
same values, and moved to the default device, which the ``ops`` fixture sets.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.ops import TORCH, TORCH_PACKING, Ops, Packing, PackRows, PackWeight
from dsv4.ops.immediate import immediate_ops
from dsv4.ops.rope import layer_inv_freq
from dsv4.ops.tables import CUDA_PACKING

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data/numeric_vectors.json").read_text(encoding="utf-8")
)
HEAD_DIM = 512
ROPE_DIM = 64
WINDOW = 128
# What float32 arithmetic of the torch ops may add, relative to the largest value, in products and
# element by element. Found: 5.2e-7 and 1.0e-7. And what that of kernels may.
SUMMED = 1.5e-6
ELEMENTWISE = 3e-7
KERNELS = 2e-6
EPS = 1e-6
# Equal to EPS in the published models; here an exchange of the two shows.
HC_EPS = 1e-4


@dataclass(frozen=True)
class OpsUnderTest(Ops):
    """The ops of a table and its layouts of weights."""

    pack_weight: PackWeight
    pack_rows: PackRows

    @classmethod
    def of(cls, ops: Ops, packing: Packing) -> "OpsUnderTest":
        return cls(**vars(ops), pack_weight=packing.pack_weight, pack_rows=packing.pack_rows)


@dataclass(frozen=True)
class Backend:
    """One op table and the device that its tensors live on."""

    ops: OpsUnderTest
    device: str


BACKENDS = {"torch": Backend(OpsUnderTest.of(TORCH, TORCH_PACKING), "cpu")}
if torch.cuda.is_available():
    BACKENDS["cuda"] = Backend(OpsUnderTest.of(immediate_ops(), CUDA_PACKING), "cuda")

TINY_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": HEAD_DIM,
    "qk_rope_head_dim": ROPE_DIM,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "sliding_window": WINDOW,
    "compress_ratios": [0, 128, 4, 4],
    "num_hash_layers": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 16,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": HC_EPS,
    "rms_norm_eps": EPS,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tiny_config(**overrides: Any) -> ModelConfig:
    """A model of four layers (window only, HCA, CSA, CSA) with the real head geometry and RoPE
    tables.
    """
    return ModelConfig.from_dict({**TINY_CONFIG, **overrides})


def inv_freq(ratio: int) -> Tensor:
    """The published RoPE table of a layer with this compress ratio."""
    return layer_inv_freq(tiny_config(), ratio).to(torch.get_default_device())


def on_device(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_device())


def normal(
    *shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """Normal values with deviation ``scale``, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return on_device((torch.randn(shape, generator=generator, device="cpu") * scale).to(dtype))


def integers(
    low: int, high: int, *shape: int, seed: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Whole numbers from ``low`` to ``high`` inclusive: sums and products of them are exact in
    float32.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return on_device(
        torch.randint(low, high + 1, shape, generator=generator, device="cpu").to(dtype)
    )


def positions(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def exact_rope(x: Tensor, position: int, frequencies: Tensor, inverse: bool = False) -> Tensor:
    """float64 ``[..., D]`` rotated as complex numbers by the float32 angle of model.md#rope."""
    angle = (torch.tensor(float(position)) * frequencies).double()
    turn = torch.polar(torch.ones_like(angle), -angle if inverse else angle)
    width = 2 * frequencies.shape[0]
    pairs = torch.view_as_complex(x.double()[..., -width:].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat(
        (x.double()[..., :-width], torch.view_as_real(pairs * turn).flatten(-2)), dim=-1
    )


def exact_sylvester(width: int) -> Tensor:
    """float64 H[i, j] = (−1)^popcount(i & j): the Hadamard matrix in natural order."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    return torch.tensor(signs, dtype=torch.float64)


def by_device(torch_ops: float, kernels: float) -> float:
    """A bound of the op table whose device is the default one: kernels add in another order and
    have exponentials of their own.
    """
    return torch_ops if torch.get_default_device().type == "cpu" else kernels


def assert_rounded_once(actual: Tensor, exact: Tensor, slack: float = SUMMED) -> None:
    """Every element is the exact float64 value after one rounding to the dtype of ``actual``.

    ``slack`` is what float32 arithmetic may add before that rounding, relative to the largest
    element; kernels may add 2e-6.
    """
    assert actual.shape == exact.shape
    slack = max(slack, KERNELS) if actual.is_cuda else slack
    error = (actual.double() - exact).abs()
    half_ulp = torch.finfo(actual.dtype).eps / 2
    allowed = half_ulp * exact.abs() + slack * exact.abs().amax()
    assert bool((error <= allowed).all()), (
        f"largest error {float(error.max()):.3g} at {float(exact.abs().max()):.3g}"
    )


def assert_near(actual: Tensor, exact: Tensor, relative_to_peak: float) -> None:
    """The largest error is at most ``relative_to_peak`` of the largest exact value; NaN fails."""
    assert actual.shape == exact.shape
    error = float((actual.double() - exact.double()).abs().max())
    assert error <= relative_to_peak * float(exact.abs().max()), f"largest error {error:.3g}"
