"""``bench engine --geometry … --draft``: steps with drafts on random weights, by their length,
against the bytes that each has to read.

Random modules guess nothing, so what a step gives is computed from an acceptance that is assumed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.bench.geometry_bytes import read_bytes, serves_choice, stored_bytes
from dsv4.bench.layer_times import keep_everything
from dsv4.checkpoint import Layout
from dsv4.config import ModelConfig
from dsv4.decode.drafted_decoder import DraftedDecoder
from dsv4.engine import Engine
from dsv4.launch.items import Launch
from dsv4.layers.values import Watch
from dsv4.limits import MAX_DECODE_TOKENS
from dsv4.parallel.sharding import HEAD, local_parameters
from dsv4.sampling import Sampler, SamplingParams
from dsv4.speculative.block_loop import Drafting
from dsv4.speculative.recorded_steps import DraftedRecordedSteps
from dsv4.speculative.tally import DraftCount, Tally
from dsv4.step.step import Step
from dsv4.weights.parameters import MtpKind, Parameter, Role

# Steps before those that count, and those.
_WARM_UP = 6
_STEPS = 30
_DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_markov_rank": 256,
}
_DSPARK_STAGES = 3
# What the rows of a module read in a step that verifies.
_REMEMBERED = ("main_proj.weight", "attn.wkv.weight", "e_proj.weight", "h_proj.weight")


@dataclass(frozen=True)
class DraftRun:
    """The module to measure and the assumed share of drafts that are kept behind kept ones."""

    kind: MtpKind
    acceptance: float


def drafted_geometry(raw: dict[str, Any], kind: MtpKind) -> dict[str, Any]:
    """``config.json`` of a geometry with a module of this kind, as published ones have it."""
    layers = raw["num_hidden_layers"]
    ratios = raw["compress_ratios"][:layers]
    if kind == "classic":
        return {**raw, "compress_ratios": [*ratios, 0]}
    targets = list(range(max(0, layers - _DSPARK_STAGES), layers))
    given = {**_DSPARK, "dspark_target_layer_ids": targets}
    return {**raw, **given, "compress_ratios": [*ratios, *[0] * _DSPARK_STAGES]}


def bench_drafts(
    engine: Engine, layout: Layout, run: DraftRun, position: int, bytes_per_second: float
) -> dict[str, Any]:
    """By tokens of a step: µs of drafting and of verifying from ``position`` on, as replayed graphs
    with the host ahead; distinct experts of a layer; the floor of both, which is reading their
    bytes one after another at ``bytes_per_second``; ms per token at the assumed acceptance.
    """
    steps = engine.steps
    assert isinstance(steps, DraftedRecordedSteps)
    decoder = DraftedDecoder(steps, "full", engine.max_context)
    records = {}
    for tokens in range(1, min(steps.along.module.scope.most + 1, MAX_DECODE_TOKENS) + 1):
        seconds = _step_seconds(engine, decoder, tokens - 1, position)
        distinct = _distinct_experts(engine, tokens, position)
        of_draft = _distinct_of_draft(steps, tokens - 1)
        found = DraftBytes(engine.config, layout, run.kind, len(steps.ranks))
        dense = steps.step(tokens).recorded.is_dense(position + _STEPS * tokens)
        floors = (found.draft(tokens - 1, of_draft), found.verify(distinct, dense))
        draft, verify = (1e6 * nbytes / bytes_per_second for nbytes in floors)
        given = sum(run.acceptance**place for place in range(tokens))
        records[str(tokens)] = {
            "draft_us": round(1e6 * seconds[0], 1),
            "verify_us": round(1e6 * seconds[1], 1),
            "distinct_experts": round(distinct, 2),
            "distinct_experts_of_a_draft_stage": round(of_draft, 2),
            "draft_floor_us": round(draft, 1),
            "verify_floor_us": round(verify, 1),
            "draft_times_the_floor": round(1e6 * seconds[0] / draft, 3) if tokens > 1 else None,
            "verify_times_the_floor": round(1e6 * seconds[1] / verify, 3),
            "tokens_per_step": round(given, 3),
            "ms_per_token": round(1e3 * sum(seconds) / given, 4),
        }
    return {
        "module": run.kind,
        "assumed_acceptance": run.acceptance,
        "tokens_per_step": "1 + a + a² + … with a the assumed acceptance of each draft",
        "mode": "full",
        "steps": records,
    }


def _step_seconds(
    engine: Engine, decoder: DraftedDecoder, drafts: int, position: int
) -> tuple[float, float]:
    """Of drafting and of verifying a step on the device of the head (rank 0's), on average."""
    engine.state.set_position(position)
    draft = engine.state.draft
    assert draft is not None
    draft.begin(0, position)
    sampler = Sampler(SamplingParams(temperature=0))
    for count in (_WARM_UP, _STEPS):
        tally = Tally(MAX_DECODE_TOKENS)
        drafting = Drafting(DraftCount((drafts,)), tally)
        room = count * (drafts + 1)
        tokens = decoder.following(0, sampler, room, decoder.blocks(), drafting)
        for _ in tokens:
            if tally.stats().steps >= count:
                break
        tokens.close()
        engine.state.set_position(position)
        draft.begin(0, position)
    stats = tally.stats()
    return stats.draft_seconds / stats.steps, stats.verify_seconds / stats.steps


def _distinct_experts(engine: Engine, tokens: int, position: int) -> float:
    """Of a layer, on average over layers with routed experts and steps of random tokens."""
    counts: list[int] = []

    def seen(name: str, rows: Tensor) -> None:
        counts.append(len(rows.unique()))

    engine.state.set_position(position)
    run = engine.steps.traced(Watch(seen, lambda name: name.endswith("router.experts")))
    generator = torch.Generator().manual_seed(tokens)
    for _ in range(4):
        ids = torch.randint(engine.config.vocab_size, (tokens,), generator=generator).tolist()
        run(ids)
    engine.state.set_position(position)
    return sum(counts) / len(counts)


@torch.inference_mode()
def _distinct_of_draft(steps: DraftedRecordedSteps, drafts: int) -> float:
    """Of a stage, on average, in a draft step whose buffers share no memory."""
    if not drafts:
        return 0.0
    recorded = steps.recorded_draft_steps(drafts)
    for step in recorded:
        keep_everything(step.recordings[step.head])
    ranks = [Step(step, {}, {}) for step in recorded]
    joined = steps.joined(ranks)
    joined.run(joined.tokens)
    program = ranks[0].head_program
    chosen = [
        item.arguments["ids_TP"]
        for item in program.recording.items
        if isinstance(item, Launch) and item.signature.kernel == "moe_decode"
    ]
    counts = [len(program.tensor(ids).unique()) for ids in chosen if isinstance(ids, Tensor)]
    return sum(counts) / len(counts)


@dataclass(frozen=True)
class DraftBytes:
    """Weight bytes that the parts of a step have to read once, of several ranks those of each."""

    config: ModelConfig
    layout: Layout
    kind: MtpKind
    ranks: int

    def verify(self, distinct: float, dense: bool) -> float:
        """The main model on tokens that take ``distinct`` experts a layer, and the module's rows;
        ``dense``: in a dense step.
        """
        main = [found for found in self._main() if not (dense and serves_choice(found))]
        remembered = sum(stored_bytes(found, self.layout) for found in self._remembered())
        return self._sum(distinct, main) + remembered

    def draft(self, drafts: int, distinct: float) -> float:
        """So many drafts, of rows that take ``distinct`` experts a stage."""
        if not drafts:
            return 0.0
        head = self._parameters()[HEAD]
        module = [found for found in self._module() if not self._is_apart(found.name)]
        total = self._sum(distinct, [*module, head])
        if self.kind == "classic":
            return total * drafts
        markov = [found for found in self._module() if found.name.endswith("markov_w2.weight")]
        return total + drafts * self._sum(0, markov)

    @staticmethod
    def _is_apart(name: str) -> bool:
        """Whether a draft does not read it whole: tables, and what the module's rows read."""
        return name.endswith(("main_proj.weight", "markov_w1.weight", "markov_w2.weight")) or (
            "confidence" in name
        )

    def _main(self) -> list[Parameter]:
        return [
            found
            for name, found in self._parameters().items()
            if not name.startswith(("embed.", "mtp.")) and found.role is not Role.TABLE
        ]

    def _module(self) -> list[Parameter]:
        return [found for name, found in self._parameters().items() if name.startswith("mtp.")]

    def _parameters(self) -> dict[str, Parameter]:
        return local_parameters(self.config, self.ranks, 0, self.kind)

    def _remembered(self) -> list[Parameter]:
        return [found for found in self._module() if found.name.endswith(_REMEMBERED)]

    def _sum(self, distinct: float, found: Iterable[Parameter]) -> float:
        sizes = read_bytes(self._parameters().values(), self.layout, self.ranks)
        return sum(
            sizes[parameter.name]
            * (distinct / self.config.n_routed_experts if parameter.role is Role.EXPERT else 1.0)
            for parameter in found
        )
