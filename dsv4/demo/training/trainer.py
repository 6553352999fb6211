"""Trainer: the steps, the losses and the held-out scores of a training phase of the demo model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from dsv4.demo import CHECKPOINT
from dsv4.demo.training import fast_forward, weights
from dsv4.demo.training.data import BatchShape
from dsv4.demo.training.fast_attention import Options, Rope
from dsv4.demo.training.fast_forward import Kernels

TOKENIZER = CHECKPOINT / "tokenizer.json"
SHORT = BatchShape(512, 64, 0.4)
LONG = BatchShape(2560, 12, 0.8)
PROMPT_WEIGHT = 0.05
BIAS_SPEED = 1e-3
SENT_LEAST = 0.06


@dataclass(frozen=True)
class Phase:
    """The weights that a phase trains, its learning rates and texts: ``long_share`` of the batches
    are long from ``long_from`` of the phase on. ``sent_share`` and ``near_share`` (``BatchShape``)
    are those at its start and fall to ``SENT_LEAST`` and none. ``warm_up``: steps of a rising rate.
    """

    options: Options
    peak_rate: float
    final_rate: float
    quantized: bool
    trained: str
    long_from: float
    long_share: float
    sent_share: float = 0.0
    near_share: float = 0.0
    warm_up: int = 200


PHASES = {
    "base": Phase(Options(index_loss=True), 2e-3, 2e-4, False, "", 0.4, 0.5),
    "index": Phase(Options(index_loss=True), 1e-3, 1e-4, False, ".indexer.", 0.0, 1.0),
    "confirm": Phase(
        Options(select=True, index_loss=True), 5e-4, 1e-5, True, "", 0.0, 0.2, 0.6, 0.4, 30
    ),
    "finish": Phase(Options(select=True, index_loss=True), 5e-4, 1e-5, True, "", 0.0, 0.5),
}


class Trainer:
    """Float32 master weights, their forward values in the model (rounded or fake-quantised), AdamW
    on the masters.
    """

    def __init__(self, model: Any, device: str, compiled: bool) -> None:
        self.model = model
        self.device = device
        self.masters = {name: p.detach().float().to(device) for name, p in model.named_parameters()}
        weights.to_training_dtypes(model)
        model.to(device)
        self.compiled = compiled and device != "cpu"
        self.kernels, self.loss = kernels(device, compiled)
        self.tokenizer = Tokenizer.from_file(str(TOKENIZER))
        self.ropes: dict[int, dict[str, Rope]] = {}
        self.begin(PHASES["base"])

    def begin(self, phase: Phase) -> None:
        """Starts a phase: which weights it moves, with a fresh optimiser."""
        self.phase = phase
        model = self.model
        self.trained = [(name, p) for name, p in model.named_parameters() if phase.trained in name]
        matrices = [
            self.masters[name] for name, p in self.trained if p.ndim >= 2 and "_hc" not in name
        ]
        vectors = [self.masters[name] for name, p in self.trained if p.ndim < 2 or "_hc" in name]
        groups = [
            {"params": matrices, "weight_decay": 0.02},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=(0.9, 0.97), fused=self.device == "cuda"
        )

    def set_forward_values(self, quantized: bool) -> None:
        """Writes the masters into the model, through the file's quantisers if asked."""
        values = list(self.masters.values())
        with torch.no_grad():
            if quantized:
                values = [
                    weights.fake_quantized(name, master) for name, master in self.masters.items()
                ]
            torch._foreach_copy_(list(self.model.parameters()), values)

    def hidden(self, ids: Tensor, options: Options, fast: bool = True) -> tuple[Tensor, ...]:
        """Final hidden states, expert loads and indexer loss of token ids ``[B, S]``."""
        length = ids.shape[1]
        if length not in self.ropes:
            self.ropes[length] = fast_forward.rope_tables(self.model, length, self.device)
        if length < LONG.length and not options.select and not self.phase.trained:
            options = replace(options, index_loss=False)
        used = self.kernels if fast else Kernels(self.kernels.sinkhorn, fast_forward.block)
        return fast_forward.forward(self.model, ids, self.ropes[length], options, used)

    def warm_up(self, shape: BatchShape) -> None:
        """Compiles what steps of this shape run."""
        blank = torch.zeros(2, shape.rows, shape.length + 1, dtype=torch.int16, device=self.device)
        self.set_forward_values(self.phase.quantized)
        self.gradients(blank)
        self.model.zero_grad(set_to_none=True)

    def gradients(self, batch: Tensor) -> tuple[Tensor, ...]:
        """Forward and backward on int16 ``[2, B, S + 1]``; returns the token loss, the indexer
        loss and the expert loads.
        """
        ids = batch[0].long()
        hidden, loads, index_loss = self.hidden(ids[:, :-1], self.phase.options)
        token_loss = self.loss(hidden, self.model.lm_head.weight, ids[:, 1:], batch[1, :, 1:])
        # A narrower phase keeps the whole graph, so that no other one must be compiled; only its
        # own weights move.
        total = index_loss if self.phase.trained else token_loss + index_loss
        total.backward()
        return token_loss.detach(), index_loss.detach(), loads

    def step(self, batch: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """One optimiser step on int16 ``[2, B, S + 1]``; returns the token loss and the indexer
        loss.
        """
        self.set_forward_values(self.phase.quantized)
        token_loss, index_loss, loads = self.gradients(batch)
        masters = []
        for name, p in self.trained:
            if p.grad is not None:
                self.masters[name].grad = p.grad.float()
                masters.append(self.masters[name])
        self.model.zero_grad(set_to_none=True)
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if not self.phase.quantized and not self.phase.trained:
            self.balance(loads)
        return token_loss, index_loss

    @torch.no_grad()
    def balance(self, loads: Tensor) -> None:
        """Moves the routers' selection bias towards equal expert loads (the auxiliary-loss-free
        rule).
        """
        for layer, load in zip(self.model.model.layers, loads, strict=True):
            if not layer.mlp.is_hash:
                layer.mlp.gate.e_score_correction_bias += BIAS_SPEED * torch.sign(
                    load.mean() - load
                )

    @torch.no_grad()
    def evaluate(self, batches: dict[str, Tensor], options: Options) -> dict[str, float]:
        """Share of held-out examples whose whole last answer is the arg-max, given the prompt
        (greedy exact match).
        """
        self.set_forward_values(self.phase.quantized)
        result = {}
        for task, batch in batches.items():
            ids = batch[0].long()
            marks = batch[1, :, 1:].bool()
            hidden, _, _ = self.hidden(ids[:, :-1], options, fast=False)
            wrong = (self.model.lm_head(hidden).argmax(-1) != ids[:, 1:]) & marks
            result[task] = (~wrong.any(-1)).float().mean().item()
            if result[task] < 0.95:
                self.show_failure(task, ids[:, 1:], marks, wrong)
        return result

    def show_failure(self, task: str, targets: Tensor, marks: Tensor, wrong: Tensor) -> None:
        """Prints where the first failing answer of a task goes wrong."""
        row = int(wrong.any(-1).nonzero()[0])
        wanted = targets[row][marks[row]].tolist()
        missed = targets[row][wrong[row]].tolist()
        print(
            f"    {task}: {self.tokenizer.decode(wanted)!r} "
            f"misses {self.tokenizer.decode(missed)!r}",
            flush=True,
        )

    def state(self) -> dict[str, Tensor]:
        """Weights, router bias and hash table under transformers' names.

        A quantised phase saves what its forward pass used; experts stay float32 there, because
        NVFP4 values do not fit bfloat16. Other matrices are bfloat16.
        """
        state = {
            n: b
            for n, b in self.model.named_buffers()
            if n.endswith(("tid2eid", "e_score_correction_bias"))
        }
        for name, p in self.model.named_parameters():
            value = self.masters[name]
            if self.phase.quantized:
                value = weights.fake_quantized(name, value)
            keep = p.dtype == torch.float32 or (self.phase.quantized and ".experts." in name)
            state[name] = value if keep else value.bfloat16()
        return state


def shape_at(phase: Phase, fraction: float, long: bool, rows: int) -> BatchShape:
    """The batch ``fraction`` of a phase's time after its start; ``rows`` of a short one."""
    if long:
        return replace(LONG, rows=max(1, LONG.rows * rows // SHORT.rows))
    if phase.sent_share == 0:
        return replace(SHORT, rows=rows)
    left = max(0.0, 1 - fraction)
    share = SENT_LEAST + (phase.sent_share - SENT_LEAST) * left
    # Near ones are over after half of the phase.
    near = phase.near_share * max(0.0, 2 * left - 1)
    return replace(SHORT, rows=rows, sent_share=share, near_share=near)


def kernels(device: str, compiled: bool) -> tuple[Kernels, Callable[..., Tensor]]:
    """The fast pieces: Triton Sinkhorn on a GPU, and the block and the loss compiled if asked."""
    if device == "cpu":
        return Kernels(fast_forward.plain_sinkhorn, fast_forward.block), token_loss
    from dsv4.demo.training import sinkhorn

    assert sinkhorn.sinkhorn is not None
    balance = torch.ops.dsv4_demo.sinkhorn.default
    if not compiled:
        return Kernels(balance, fast_forward.block), token_loss
    from torch import _dynamo

    _dynamo.config.recompile_limit = 64
    block = torch.compile(fast_forward.block, fullgraph=True, dynamic=False)
    return Kernels(balance, block), torch.compile(token_loss, dynamic=False)


def token_loss(hidden: Tensor, head: Tensor, targets: Tensor, marks: Tensor) -> Tensor:
    """Cross entropy, weight 1 on answer tokens and ``PROMPT_WEIGHT`` elsewhere."""
    logits = F.linear(hidden.flatten(0, 1), head).float()
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
    importance = PROMPT_WEIGHT + (1 - PROMPT_WEIGHT) * marks.flatten().float()
    return (losses * importance).sum() / importance.sum()
