"""Flags of ``dsv4.validate.layers``, and the walk that they ask for."""

import argparse
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import torch

from dsv4.caches.allocation import COMPUTE_DTYPES
from dsv4.checkpoint import Layout, geometry_config
from dsv4.checkpoint.layer_weights import LayerSource, RandomLayers, StoredLayers
from dsv4.command.flags import (
    OneLineParser,
    add_prefill_activations,
    given_flags,
    integer,
    number,
)
from dsv4.config import ModelConfig
from dsv4.demo import CHECKPOINT
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.limits import MAX_PREFILL_CHUNK
from dsv4.ops.tables import swap_ops, torch_table
from dsv4.parallel.devices import engine_devices, table_on
from dsv4.validate.agreement import DEFAULT_THRESHOLD
from dsv4.validate.joined_trace import expect_same_tokens, expect_tokens_of, trace_with_ranks
from dsv4.validate.layer_walk import (
    EngineLayers,
    Reference,
    TorchReference,
    TraceReference,
    Walk,
    expect_streams_into,
    expect_values_of,
)
from dsv4.validate.reference_flags import (
    DEFAULT_CHUNK,
    check_outputs,
    check_reference_device,
    parse_swaps,
)
from dsv4.validate.transformers_layer import TransformersLayers

# What --input and --reference may be beside the name of a trace.
INPUTS = ("own", "reference")
REFERENCES = ("torch", "transformers")
# Near ties are decided by rounding; a wrong router or indexer leaves a share near chance.
DEFAULT_CHOICES = 0.95
MAX_SEED = 2**63 - 1


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m dsv4.validate.layers``."""
    parser = OneLineParser(prog="python -m dsv4.validate.layers", description=description)
    add = parser.add_argument
    add("--model", type=Path, default=CHECKPOINT, help="a checkpoint folder; default: the demo")
    add("--geometry", choices=("v4-flash", "v4-pro"), help="random weights instead of a checkpoint")
    add("--layout", choices=get_args(Layout), default="nvfp4-experts", help="of random weights")
    add("--layers", metavar="A:B", default=":", help="layers A to B − 1, or one layer; default all")
    add("--tokens", type=integer(1, 65536), default=24, help="random ids; default %(default)s")
    add(
        "--context",
        type=integer(0, 2**20),
        default=0,
        help="how many tokens came before them, of which the caches hold random rows; default 0",
    )
    seed = integer(0, MAX_SEED)
    add("--seed", type=seed, default=0, help="of weights, ids and streams; default 0")
    add(
        "--input",
        default="own",
        metavar="own|reference|FILE",
        help="what a layer reads: this engine's result of the layer before it (default), the "
        "reference's, or what entered it in a trace; the first layer without a trace reads the "
        "embedded tokens (layer 0) or random streams",
    )
    add(
        "--reference",
        default="torch",
        metavar="torch|transformers|FILE",
        help="the other side: the torch ops (default), transformers in float32, or a trace",
    )
    add(
        "--chunk",
        type=integer(1, MAX_PREFILL_CHUNK),
        action="append",
        help=f"tokens per step, up to 8: decode kernels; repeatable; default {DEFAULT_CHUNK}",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--gpus", type=integer(1, 8), default=1, help="layer l on GPU l mod N; default 1")
    add("--ops", choices=("auto", "torch", "cuda"), default="auto")
    add("--swap", action="append", default=[], metavar="OP=TABLE", help="e.g. moe=torch")
    add("--kv-dtype", choices=("fp8", "bf16"), default="fp8", help="also of --reference torch")
    add("--compute-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add_prefill_activations(parser)
    add("--reference-device", choices=("cpu", "cuda"), default="cpu")
    add("--reference-compute-dtype", choices=("bfloat16", "float32"), help="default: as above")
    add(
        "--threshold",
        type=number(-1, 1),
        default=DEFAULT_THRESHOLD,
        help="of every token's values; default %(default)s",
    )
    add(
        "--choices",
        type=number(0, 1),
        default=DEFAULT_CHOICES,
        help="least share of experts, and of entries, that both sides choose; default %(default)s",
    )
    add("--json", type=Path, help="write the rows, the memory and where they come from")
    add("--svg", type=Path, help="write a plot of 1 − agreement by layer")
    return parser


def parse(arguments: list[str], description: str | None) -> argparse.Namespace:
    """The flags. Raises ``UserError``, also for one that would be ignored beside the others."""
    parser = build_parser(description)
    options = parser.parse_args(arguments)
    given = given_flags(parser, options)
    unused = {"layout": "without --geometry"}
    if options.geometry is not None:
        unused = {"model": "with --geometry"}
    if options.reference != "torch":
        names = ("reference_device", "reference_compute_dtype", "context")
        unused |= dict.fromkeys(names, f"with --reference {options.reference}")
    if trace_paths(options):
        unused |= dict.fromkeys(("tokens", "context"), "with a trace, which says it")
    for name, why in unused.items():
        if name in given:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag}: found {why}, expected no {flag}")
    check_reference_device(options.reference_device)
    return options


def layer_range(text: str, layers: int) -> range:
    """``A:B``, ``A:``, ``:B``, ``:`` or ``A``. Raises ``UserError``."""
    match = re.fullmatch(r"([0-9]{0,9})(:?)([0-9]{0,9})", text)
    if match is not None and text:
        first, colon, last = match.groups()
        start = int(first or 0)
        stop = int(last or layers) if colon else start + 1
        if start < stop <= layers:
            return range(start, stop)
    raise UserError(f"--layers: found {text!r}, expected A:B with 0 ≤ A < B ≤ {layers}, or A")


def make_walk(options: argparse.Namespace, stack: ExitStack) -> Walk:
    """Both sides and their input; ``stack`` closes the files. Raises ``UserError``, also for a file
    that cannot be written.
    """
    engine, reference_engine = engine_configs(options)
    devices = engine_devices(engine)
    reference_devices = engine_devices(reference_engine)
    op_table = swap_ops(table_on(engine, devices), parse_swaps(options.swap))
    source = layer_source(options, devices[0])
    layers = layer_range(options.layers, source.config.num_hidden_layers)
    check_room(options, source.config)
    traces = {path: trace_with_ranks(path, stack) for _, path in trace_paths(options)}
    read = [(flag, file.path) for flag, path in trace_paths(options) for file in traces[path].files]
    check_outputs(options, read)
    for trace in traces.values():
        expect_same_tokens(trace, next(iter(traces.values())))
        expect_tokens_of(trace, source.config)
    reference: Reference
    if options.reference == "torch":
        torch_ops = torch_table(options.prefill_activations)
        torch_layers = EngineLayers(source, reference_engine, torch_ops, reference_devices)
        rounds = options.prefill_activations != "bf16"
        reference = TorchReference(torch_layers, None if rounds else DEFAULT_CHUNK)
    elif options.reference == "transformers":
        reference = TransformersLayers(source)
    else:
        reference = TraceReference(traces[Path(options.reference)])
        expect_values_of(reference.trace, layers, source.config)
        if options.input == "own" and layers.start > 0:
            expected = "'reference' or a trace: its layer did not read random streams"
            found = f"'own' with a trace as reference and layers from {layers.start}"
            raise UserError(f"--input: found {found}, expected {expected}")
    exact = {engine.compute_dtype, reference_engine.compute_dtype} == {"float32"}
    entered = options.reference if options.input == "reference" else options.input
    entering = traces.get(Path(entered))
    if entering is not None:
        expect_streams_into(entering, layers, source.config)
    return Walk(
        EngineLayers(source, engine, op_table, devices),
        reference,
        layers,
        options.chunk or [DEFAULT_CHUNK],
        next((trace.token_ids for trace in traces.values()), None) or random_ids(options, source),
        options.context,
        options.input if entering is None else "trace",
        entering,
        list(traces.values()),
        COMPUTE_DTYPES["float32" if exact else "bfloat16"],
        options.seed,
        options.threshold,
        options.choices,
    )


def engine_configs(options: argparse.Namespace) -> tuple[EngineConfig, EngineConfig]:
    """How this engine and the torch reference compute. Raises ``UserError``."""
    found = EngineConfig(
        device=options.device,
        gpus=options.gpus,
        ops=options.ops,
        kv_dtype=options.kv_dtype,
        compute_dtype=options.compute_dtype,
        prefill_activations=options.prefill_activations,
    )
    reference = EngineConfig(
        device=options.reference_device,
        ops="torch",
        kv_dtype=options.kv_dtype,
        compute_dtype=options.reference_compute_dtype or options.compute_dtype,
        prefill_activations=options.prefill_activations,
    )
    return found, reference


def layer_source(options: argparse.Namespace, drawn_on: torch.device) -> LayerSource:
    """The checkpoint, or random layers. Raises ``UserError``."""
    if options.geometry is None:
        return StoredLayers(options.model)
    raw = geometry_config(options.geometry)
    return RandomLayers(raw, options.layout, options.seed, drawn_on)


def trace_paths(options: argparse.Namespace) -> list[tuple[str, Path]]:
    """The files that are read, of the input and of the reference, with their flags."""
    given = (("--input", options.input, INPUTS), ("--reference", options.reference, REFERENCES))
    return [(flag, Path(name)) for flag, name, known in given if name not in known]


def check_room(options: argparse.Namespace, config: ModelConfig) -> None:
    """Raises ``UserError`` for more tokens than the model has positions."""
    positions = config.max_position_embeddings
    if options.context + options.tokens > positions:
        found = f"{options.context} and --tokens {options.tokens}"
        raise UserError(f"--context: found {found}, expected at most {positions} together")


def random_ids(options: argparse.Namespace, source: LayerSource) -> list[int]:
    """``--tokens`` ids of the model."""
    generator = torch.Generator().manual_seed(options.seed)
    vocabulary = source.config.vocab_size
    return torch.randint(vocabulary, (options.tokens,), generator=generator).tolist()


def described(options: argparse.Namespace) -> dict[str, Any]:
    """What was compared, for the record."""
    random = options.geometry is not None
    return {
        "model": options.geometry if random else options.model.resolve().name,
        "layout": options.layout if random else None,
        "input": options.input,
        "reference": options.reference,
        "threshold": options.threshold,
        "choices": options.choices,
    }
