"""Converts a checkpoint: ``python -m dsv4.checkpoint.export SRC DST --format FORMAT [--names
{native,hf}]``.

Streams one matrix at a time, so the memory needed is a few times the largest matrix. ``DST``
appears only when it is complete. Matrices that are in the wanted format already keep their bytes,
``input_scale`` included.
"""

import argparse
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from dsv4.checkpoint.convert import convert
from dsv4.checkpoint.drafts import mtp_kind
from dsv4.checkpoint.index import INDEX_NAME, Checkpoint, open_checkpoint
from dsv4.checkpoint.layouts import Layout, check_layout, declare, format_in
from dsv4.checkpoint.matrices import load_matrix
from dsv4.checkpoint.names import Dialect, detect_dialect
from dsv4.checkpoint.outputs import output_tensors
from dsv4.checkpoint.plain import read_plain
from dsv4.checkpoint.problems import Problems
from dsv4.checkpoint.scale_values import (
    check_converted,
    check_input_scales,
    unfilled_input_scales,
)
from dsv4.checkpoint.stored_parameters import StoredParameter, find_parameters
from dsv4.checkpoint.transfer import transfer
from dsv4.checkpoint.writer import (
    DEFAULT_SHARD_BYTES,
    check_room,
    naming_file,
    new_folder,
    write_json,
    write_shards,
)
from dsv4.command.flags import OneLineParser
from dsv4.command.program import command, run_program
from dsv4.command.progress import GIGABYTES, ProgressBar
from dsv4.errors import UserError
from dsv4.model_files import resolve_inside
from dsv4.progress import Progress
from dsv4.weights.parameters import Parameter, Role
from dsv4.weights.quant import QuantFormat, QuantTensor

_CPU = torch.device("cpu")
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".md", ".model", ".py")
_REWRITTEN = ("config.json", "hf_quant_config.json", INDEX_NAME)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def export(
    source: str | Path,
    destination: str | Path,
    layout: Layout,
    names: Dialect,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Writes the checkpoint ``source`` to the new folder ``destination`` in another layout and
    dialect. ``progress(done_bytes, total_bytes)`` is told of what is written.

    The speculative module, tokenizer, generation and encoding files come along. Raises
    ``UserError`` when ``source`` cannot be loaded or changes meanwhile, ``destination`` exists or
    there is not enough room for it; nothing is left behind then.
    """
    check_layout(layout)
    checkpoint = open_checkpoint(source)
    config = checkpoint.model_config()
    found = {
        stored.parameter.name: stored
        for stored in find_parameters(checkpoint, config, mtp_kind(checkpoint))
    }
    parameters = {name: stored.parameter for name, stored in found.items()}
    destination = Path(destination)
    with new_folder(destination) as folder:
        _check_small_tensors(checkpoint, list(found.values()), config.n_routed_experts)
        declared, separate = _declarations(
            checkpoint, list(found.values()), layout, names, config.num_hidden_layers
        )
        tensors = output_tensors(layout, names, parameters, _Converted(checkpoint, found, layout))
        others = _other_files(checkpoint.folder)
        small = sum(file.stat().st_size for file in others.values())
        check_room(folder, small + sum(tensor.nbytes for tensor in tensors))
        with naming_file(destination / "config.json"):
            write_json(folder / "config.json", declared)
        if separate is not None:
            with naming_file(destination / "hf_quant_config.json"):
                write_json(folder / "hf_quant_config.json", separate)
        for name, file in others.items():
            content = file.read_bytes()
            with naming_file(destination / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
        write_shards(folder, tensors, shard_bytes, progress, destination=destination)
        checkpoint.check_unchanged()


def _check_small_tensors(
    checkpoint: Checkpoint, found: list[StoredParameter], experts: int
) -> None:
    """Raises what loading them would: they are written as they are."""
    problems = Problems()
    for stored in found:
        if stored.format is None:
            read_plain(checkpoint, stored, experts, problems)
    problems.raise_if_any(str(checkpoint.folder))
    scales = [(stored, *unfilled_input_scales(checkpoint, stored, _CPU)) for stored in found]
    transfer([piece for _, _, pieces in scales for piece in pieces], lambda _: None)
    for stored, values, _ in scales:
        check_input_scales(checkpoint, stored, values)


class _Converted:
    """``WeightSource`` of a checkpoint: loads one matrix, or a pair w1 and w3, and converts it."""

    def __init__(
        self, checkpoint: Checkpoint, found: dict[str, StoredParameter], layout: Layout
    ) -> None:
        self._checkpoint = checkpoint
        self._found = found
        self._layout: Layout = layout
        # The matrices of one expert (or one other matrix) at a time: their data and scales are
        # asked for one by one.
        self._unit: tuple[str, int | None] = ("", None)
        self._converted: dict[str, QuantTensor] = {}

    def matrix(self, parameter: Parameter, expert: int | None) -> QuantTensor:
        unit = (
            parameter.name if expert is None else parameter.name.rpartition(".experts.")[0],
            expert,
        )
        if unit != self._unit:
            self._unit = unit
            self._converted = {}
        if parameter.name not in self._converted:
            self._convert(_together(parameter), expert)
        return self._converted[parameter.name]

    def _convert(self, names: list[str], expert: int | None) -> None:
        stored = [self._found[name] for name in names]
        format = format_in(self._layout, stored[0].parameter)
        assert format is not None
        loaded = [load_matrix(self._checkpoint, one, _CPU, expert) for one in stored]
        try:
            converted = convert(loaded, format)
            for weight in converted:
                check_converted(weight)
        except ValueError as error:
            where = names[0] if expert is None else f"{names[0]} (expert {expert})"
            raise UserError(f"{self._checkpoint.folder}: {where}: {error}") from None
        self._converted.update(zip(names, converted, strict=True))

    def plain(self, parameter: Parameter) -> Tensor:
        return self._checkpoint.read(self._found[parameter.name].parts["data"].names[0])

    def input_scale(self, parameter: Parameter, expert: int | None) -> Tensor | None:
        stored = self._found[parameter.name]
        if stored.format is not QuantFormat.NVFP4:
            return torch.tensor(1.0, dtype=torch.float32)
        if "input_scale" not in stored.parts:
            return None
        name = stored.parts["input_scale"].names[expert or 0]
        # A copy: tens of thousands of scalars must not keep as many mappings alive.
        return self._checkpoint.read(name).clone().view(())

    def fp8_scale_dtype(self, parameter: Parameter) -> torch.dtype:
        stored = self._found[parameter.name]
        return (
            stored.parts["block_scale"].dtype
            if stored.format is QuantFormat.FP8_BLOCK128
            else torch.float8_e8m0fnu
        )


def _together(parameter: Parameter) -> list[str]:
    """Names of the matrices that must share their global scale with ``parameter``."""
    name = parameter.name
    if parameter.role is not Role.EXPERT or name.endswith(".w2.weight"):
        return [name]
    prefix = name.removesuffix(".w1.weight").removesuffix(".w3.weight")
    return [f"{prefix}.w1.weight", f"{prefix}.w3.weight"]


def _declarations(
    checkpoint: Checkpoint,
    found: list[StoredParameter],
    layout: Layout,
    names: Dialect,
    layers: int,
) -> tuple[dict, dict | None]:
    """The source's declaration if nothing changes, else the one of the layout."""
    same_names = detect_dialect(checkpoint.tensors, str(checkpoint.folder)) is names
    if same_names and all(stored.format is format_in(layout, stored.parameter) for stored in found):
        return checkpoint.raw_config, checkpoint.hf_quant_config
    return declare(checkpoint.raw_config, layout, names, layers)


def _other_files(source: Path) -> dict[str, Path]:
    """The files that come along as they are, by their names in the folder."""
    files = [
        file.relative_to(source)
        for file in (*source.glob("*"), *source.glob("encoding/**/*"))
        if file.is_file()
    ]
    return {
        str(file): resolve_inside(source, str(file), "the folder listing")
        for file in files
        if str(file) not in _REWRITTEN
        and (file.suffix in _COPIED_SUFFIXES or file.name == "LICENSE")
    }


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)B?", text.upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a size such as 5GB")
    return int(match[1]) * _UNITS[match[2]]


@command
def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = OneLineParser(
        prog="python -m dsv4.checkpoint.export", description="Convert a checkpoint folder."
    )
    parser.add_argument(
        "source", metavar="SRC", type=Path, help="checkpoint folder in any supported format"
    )
    parser.add_argument("destination", metavar="DST", type=Path, help="new folder to write")
    parser.add_argument(
        "--format", required=True, choices=["nvfp4-experts", "nvfp4-all", "native", "bf16"]
    )
    parser.add_argument("--names", default="native", choices=["native", "hf"])
    parser.add_argument(
        "--shard-size",
        type=_size,
        default=DEFAULT_SHARD_BYTES,
        help="bytes, or 500MB, 5GB (default)",
    )
    options = parser.parse_args(arguments)
    with ProgressBar("export", GIGABYTES, sys.stderr, sys.stderr.isatty()) as bar:
        export(
            options.source,
            options.destination,
            options.format,
            Dialect(options.names),
            options.shard_size,
            bar,
        )
    return 0


if __name__ == "__main__":
    run_program(main)
