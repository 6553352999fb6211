"""EngineConfig: how to run a model; frozen and validated."""

import os
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

from dsv4.errors import UserError, shorten
from dsv4.limits import MAX_DRAFTS, MAX_PREFILL_CHUNK

# What weights are multiplied with in steps of more than MAX_DECODE_TOKENS tokens.
ActivationMode = Literal["bf16", "fp8", "nvfp4"]
ACTIVATION_MODES: tuple[ActivationMode, ...] = get_args(ActivationMode)
# How several GPUs share a model.
Parallel = Literal["pipeline", "round-robin", "tensor"]
PARALLEL: tuple[Parallel, ...] = get_args(Parallel)
TENSOR_GPUS = (2, 4, 8)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "parallel": PARALLEL,
    "kv_dtype": ("fp8", "bf16"),
    "index_dtype": ("fp8", "bf16", None),
    "compute_dtype": ("bfloat16", "float32"),
    "ops": ("auto", "torch", "cuda"),
    "cuda_graph": ("auto", "split", "full", None),
    "prefill_activations": ACTIVATION_MODES,
    "draft": ("auto", "off", "mtp", "dspark"),
}
_RANGES = {
    "gpus": (1, 8),
    "prefill_chunk": (1, MAX_PREFILL_CHUNK),
    "max_context": (1, 2**31 - 1),
}


@dataclass(frozen=True)
class EngineConfig:
    """How to run the model; everything that is not a property of the checkpoint.

    ``device`` is "auto" (CUDA when there is a device), "cpu" or "cuda". ``parallel`` spreads the
    layers over ``gpus`` devices, 1 to 8: contiguous and balanced by bytes ("pipeline"), layer l on
    device l mod N ("round-robin"), or a part of every layer on each of 2, 4 or 8 ("tensor").
    ``compute_dtype`` is what is computed in; "float32" takes the torch ops and keeps matrices as
    float32. ``kv_dtype`` and ``index_dtype`` choose what the caches hold: "fp8" rows
    (model.md#cache-rows) or "bf16", not quantised, stored in ``compute_dtype``; ``index_dtype``
    None follows ``kv_dtype``. ``max_context`` is in tokens (``None``: the model's maximum, at most
    8192); ``prefill_chunk`` in tokens per forward, 1 to 16384 (None: by the devices, on several
    also by the length of the prompt). ``ops``: the op table; "auto" is "cuda" on a GPU in bfloat16,
    with native kernels where they have passed their checks, else "torch". ``require_native``: an
    error where native kernels are not used. ``cuda_graph``: how single tokens are decoded: eagerly
    (None) or by ``CUDAGraphDecoder`` in a mode; "auto" takes the faster one that is exact.
    ``prefill_activations``: what quantised weights are multiplied with in a prompt: activations of
    16 bit ("bf16") or rounded ones (numerics.md#quantised-activations). ``draft``: the draft module
    (docs/speculative.md), "auto" the one of ``draft_weights``, or with the CUDA ops that of the
    checkpoint where there is room; one that is off is not loaded. ``draft_tokens``: drafts of a
    step, None as many as the module was trained to make (of a ``draft`` "auto" these or none,
    whichever is measured to be faster), "auto" any number by what is measured. ``draft_weights``: a
    folder that holds the module in the place of the checkpoint. ``packed_cache``: a folder that
    keeps packed weights (docs/checkpoints.md). Raises ``UserError``.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: int = 1
    parallel: Parallel = "pipeline"
    kv_dtype: Literal["fp8", "bf16"] = "fp8"
    index_dtype: Literal["fp8", "bf16"] | None = None
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_context: int | None = None
    prefill_chunk: int | None = None
    ops: Literal["auto", "torch", "cuda"] = "auto"
    cuda_graph: Literal["auto", "split", "full"] | None = None
    require_native: bool = False
    prefill_activations: ActivationMode = "bf16"
    draft: Literal["auto", "off", "mtp", "dspark"] = "auto"
    draft_tokens: int | Literal["auto"] | None = None
    draft_weights: str | Path | None = None
    packed_cache: str | Path | None = None

    @classmethod
    def given(cls, config: "EngineConfig | None") -> "EngineConfig":
        """``config``, the defaults for None. Raises ``UserError`` for anything else."""
        if config is None:
            return cls()
        if not isinstance(config, cls):
            raise UserError(f"config: found {shorten(config)}, expected EngineConfig(...) or None")
        return config

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_integers()
        if not isinstance(self.require_native, bool):
            found = shorten(self.require_native)
            raise UserError(f"EngineConfig.require_native: found {found}, expected True or False")
        if self.parallel == "tensor" and self.gpus not in TENSOR_GPUS:
            raise UserError(
                f"EngineConfig.gpus: found {self.gpus} with EngineConfig.parallel='tensor', "
                f"expected one of {', '.join(map(str, TENSOR_GPUS))}"
            )
        self._check_draft_tokens()
        self._check_folders()
        for field in ("draft_tokens", "draft_weights"):
            if self.draft == "off" and self.__dict__[field] is not None:
                found = "found with EngineConfig.draft='off', expected another"
                raise UserError(f"EngineConfig.{field}: {found}")
        if self.require_native and self.ops != "auto":
            found = f"found with EngineConfig.ops={self.ops!r}, expected 'auto'"
            raise UserError(f"EngineConfig.require_native: {found}")
        if self.ops == "cuda" and self.compute_dtype != "bfloat16":
            raise UserError(
                f"EngineConfig.ops: found {self.ops!r} with EngineConfig.compute_dtype='float32', "
                "expected bfloat16"
            )

    def _check_choices(self) -> None:
        for field, allowed in _CHOICES.items():
            value = self.__dict__[field]
            is_choice = value is None or isinstance(value, str)  # No array, whose == is one too.
            if not is_choice or value not in allowed:
                expected = ", ".join(map(str, allowed))
                raise UserError(
                    f"EngineConfig.{field}: found {shorten(value)}, expected one of {expected}"
                )

    def _check_integers(self) -> None:
        for field, (low, high) in _RANGES.items():
            value = self.__dict__[field]
            if value is None and field != "gpus":
                continue
            self._keep_integer(field, low, high, f"an integer from {low} to {high}")

    def _check_draft_tokens(self) -> None:
        count = self.draft_tokens
        if count is not None and not (isinstance(count, str) and count == "auto"):
            expected = f"'auto' or an integer from 1 to {MAX_DRAFTS}"
            self._keep_integer("draft_tokens", 1, MAX_DRAFTS, expected)

    def _keep_integer(self, field: str, low: int, high: int, expected: str) -> None:
        """Integers of numpy become those of Python, which JSON has. Raises ``UserError``."""
        value = self.__dict__[field]
        is_integer = isinstance(value, Integral) and not isinstance(value, bool)
        number = int(value) if is_integer else None
        if number is None or not low <= number <= high:
            found = shorten(value)
            raise UserError(f"EngineConfig.{field}: found {found}, expected {expected}")
        object.__setattr__(self, field, number)

    def _check_folders(self) -> None:
        """Paths become strings, which JSON has. Raises ``UserError``."""
        for field in ("draft_weights", "packed_cache"):
            folder = self.__dict__[field]
            if folder is None:
                continue
            name = os.fspath(folder) if isinstance(folder, str | os.PathLike) else folder
            if not (isinstance(name, str) and name):
                found = shorten(folder)
                expected = "the path of a folder"
                raise UserError(f"EngineConfig.{field}: found {found}, expected {expected}")
            object.__setattr__(self, field, name)
