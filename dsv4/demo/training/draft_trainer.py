"""The steps that train a draft module of the demo, and its weights as the folder holds them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.checkpoint import Weights, open_checkpoint
from dsv4.checkpoint.layouts import format_in
from dsv4.checkpoint.load import load_found
from dsv4.checkpoint.names import Dialect, to_native
from dsv4.checkpoint.stored_parameters import find_draft
from dsv4.checkpoint.weights_folder import write_draft
from dsv4.config import ModelConfig
from dsv4.demo import CHECKPOINT
from dsv4.demo.training import fast_forward, weights
from dsv4.demo.training.draft_nets import (
    DSPARK_KEYS,
    STAGES,
    ClassicNet,
    DSparkNet,
    Result,
    base_values,
    frozen_base,
)
from dsv4.demo.training.fast_attention import Rope
from dsv4.demo.training.trainer import kernels
from dsv4.weights.parameters import MtpKind, Parameter, parameters
from dsv4.weights.quant import QuantTensor
from dsv4.weights.quantize import quantize

LAYOUT = "native"
_OWN = {
    "e_proj": "mtp.0.e_proj.weight",
    "h_proj": "mtp.0.h_proj.weight",
    "enorm": "mtp.0.enorm.weight",
    "hnorm": "mtp.0.hnorm.weight",
    "main_proj": "mtp.0.main_proj.weight",
    "main_norm": "mtp.0.main_norm.weight",
    "markov_w1": "mtp.{last}.markov_head.markov_w1.weight",
    "markov_w2": "mtp.{last}.markov_head.markov_w2.weight",
    "confidence": "mtp.{last}.confidence_head.proj.weight",
}


def draft_config(kind: MtpKind) -> dict[str, Any]:
    """The ``config.json`` of the module's folder: the demo's, with the module's keys."""
    raw = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    return {**raw, **(DSPARK_KEYS if kind == "dspark" else {})}


def native_name(name: str, stages: int) -> str:
    """The checkpoint's name of a parameter of a ``DraftNet``."""
    last = str(stages - 1)
    if name in _OWN:
        return _OWN[name].format(last=last)
    native = to_native(name.removeprefix("core."), Dialect.HF)
    assert native is not None, name
    if native.startswith("layers."):
        return f"mtp.{native.removeprefix('layers.')}"
    return f"mtp.{last}.{native}"


class DraftTrainer:
    """Float32 master weights of the module; its forward values are those of the file, through the
    quantisers.
    """

    def __init__(self, kind: MtpKind, device: str, compiled: bool) -> None:
        self.kind: MtpKind = kind
        self.device = device
        self.stages = STAGES[kind]
        self.base = frozen_base(device)
        net = ClassicNet if kind == "classic" else DSparkNet
        self.net = net(frozen_base("cpu")).to(device)
        if device != "cpu":
            weights.to_training_dtypes(self.net.core)
        self.trained = {
            name: parameter
            for name, parameter in self.net.named_parameters()
            if parameter.requires_grad
        }
        self.masters = {name: p.detach().float().clone() for name, p in self.trained.items()}
        config = ModelConfig.from_dict(draft_config(kind))
        self.listed = parameters(config, kind, self.stages)
        self.kernels, _ = kernels(device, compiled)
        self.ropes: dict[int, dict[str, Rope]] = {}
        groups = [
            {"params": [m for m in self.masters.values() if m.ndim >= 2], "weight_decay": 0.02},
            {"params": [m for m in self.masters.values() if m.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.97), fused=device != "cpu")

    def result(self, batch: Tensor) -> Result:
        """The module on int16 ``[2, B, S + 1]``, token ids and marks of answers."""
        batch = batch.to(self.device).long()
        ids = batch[0, :, :-1]
        length = ids.shape[1]
        if length not in self.ropes:
            self.ropes[length] = fast_forward.rope_tables(self.base, length, self.device)
        ropes = self.ropes[length]
        seen = base_values(self.base, ids, ropes, self.kernels)
        return self.net(self.base, seen, batch, ropes, self.kernels)

    def step(self, batch: Tensor, rate: float) -> Result:
        """One optimiser step."""
        self.set_forward_values()
        result = self.result(batch)
        result.loss.backward()
        for name, parameter in self.trained.items():
            assert parameter.grad is not None, name
            self.masters[name].grad = parameter.grad.float()
        self.net.zero_grad(set_to_none=True)
        torch.nn.utils.clip_grad_norm_(list(self.masters.values()), 1.0, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return Result(result.loss.detach(), result.accepted)

    @torch.no_grad()
    def set_forward_values(self) -> None:
        """Writes into the module what its file would mean."""
        for name, parameter in self.trained.items():
            parameter.copy_(self._stored(name, self.masters[name])[1])

    def _stored(self, name: str, master: Tensor) -> tuple[QuantTensor | Tensor, Tensor]:
        """A parameter as it is stored, and its values."""
        native = native_name(name, self.stages)
        format = format_in(LAYOUT, self._parameter(native))
        if format is None:
            rounded = master.bfloat16() if native.endswith("norm.weight") else master
            return rounded, rounded.float()
        stored = quantize(master, format)
        return stored, stored.dequantize()

    def _parameter(self, native: str) -> Parameter:
        return self.listed[native.replace(".w13.", ".w1.")]

    @torch.no_grad()
    def weights(self) -> Weights:
        """Every parameter of the module by its canonical name, on the CPU."""
        found: Weights = {}
        for name, master in self.masters.items():
            native = native_name(name, self.stages)
            value = master.cpu()
            if ".w13." in native:
                for part, half in zip(("w1", "w3"), value.chunk(2, dim=1), strict=True):
                    found[native.replace("w13", part)] = self._stored(name, half.contiguous())[0]
            else:
                found[native] = self._stored(name, value)[0]
        for name, value in self.net.core.named_buffers():
            if name.endswith("e_score_correction_bias"):
                found[native_name(name, self.stages)] = value.float().cpu()
        return found

    def publish(self, folder: Path) -> None:
        """Writes the module's folder, which must not exist."""
        write_draft(folder, draft_config(self.kind), LAYOUT, self.weights())

    @torch.no_grad()
    def start_from(self, folder: Path) -> None:
        """Begins with the module of a folder that ``publish`` wrote."""
        holder = open_checkpoint(folder)
        config = ModelConfig.from_dict(holder.raw_config)
        found = find_draft(holder, config, self.kind)
        loaded = load_found(holder, config, found, lambda _: torch.device("cpu"))
        values = {
            name: value.dequantize() if isinstance(value, QuantTensor) else value
            for name, value in loaded.items()
        }
        for name, master in self.masters.items():
            native = native_name(name, self.stages)
            if ".w13." in native:
                parts = [values[native.replace("w13", part)] for part in ("w1", "w3")]
                master.copy_(torch.cat(parts, 1))
            else:
                master.copy_(values[native])

    def save(self, path: Path, notes: dict[str, Any]) -> None:
        """Writes all that ``load`` needs to go on."""
        state = {"masters": self.masters, "optimizer": self.optimizer.state_dict(), **notes}
        temporary = path.with_suffix(".new")
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> dict[str, Any]:
        """Goes on from what ``save`` wrote; returns its notes."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        with torch.no_grad():
            for name, master in state.pop("masters").items():
                self.masters[name].copy_(master)
        self.optimizer.load_state_dict(state.pop("optimizer"))
        return state
