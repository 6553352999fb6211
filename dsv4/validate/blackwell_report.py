"""What a machine with Blackwell GPUs makes of this code, in one file:
``python -m dsv4.validate.blackwell_report --help``.

Verdicts on every native kernel, benchmarks of ops with portable and native kernels, every way to
decode on 1 to 8 GPUs, layers and evaluation of the demo checkpoint with every kind of activations,
clocks and versions. Every section runs in a process of its own, so that a fault ends no other one.
The file, which is written anew after every section, has no host name, no user name and no path.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsv4.command.flags import OneLineParser, path
from dsv4.command.output_file import STDOUT, check_output, refuse_shared_files, write_output
from dsv4.command.program import command, run_program
from dsv4.command.streams import say
from dsv4.demo import CHECKPOINT
from dsv4.engine_config import ACTIVATION_MODES, ActivationMode
from dsv4.measure.provenance import provenance
from dsv4.measure.record_file import record_text
from dsv4.native.check import Verdict
from dsv4.native.form import NativeForm
from dsv4.native.forms import NATIVE_FORMS
from dsv4.native.verdict_file import driver_version, verdict_for
from dsv4.validate.anonymous import Anonymiser
from dsv4.validate.report_section import Finding, Section, command_section, skipped

# Of the file's keys and sections.
FORMAT = 2
DEFAULT_FILE = Path("blackwell_report.json")
GPU_COUNTS = (1, 2, 4, 8)
_BENCH = "dsv4.bench"
_COSINE = "dsv4.validate.cosine"
_LAYERS = "dsv4.validate.layers"
_TRAINING = "dsv4.demo.training"
# A section that has not ended then hangs: none is expected to take a third of it.
_LIMIT_SECONDS = 3600.0
# Of a token's values in one layer: rounding to 8 or 4 bit makes much of a little difference before
# it, and a wrong product much more.
_THRESHOLDS: Mapping[ActivationMode, float] = {"bf16": 0.999, "fp8": 0.99, "nvfp4": 0.95}
# Behind all layers a near tie has gone the other way somewhere, so that a right token may be far
# from that of the other side; NaN and the opposite are not.
_ANY_ROUNDING = 0.0
_DRY_LIMIT_SECONDS = 600.0


class Machine(NamedTuple):
    """What decides which sections can run: how many GPUs there are, and the activations that native
    kernels are made for on the first.
    """

    gpus: int
    native: frozenset[ActivationMode]

    @property
    def device(self) -> str:
        """Where the demo runs."""
        return "cuda" if self.gpus else "cpu"

    @classmethod
    def found(cls) -> "Machine":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        forms = NATIVE_FORMS.items() if gpus else ()
        first = torch.device("cuda", 0)
        return cls(gpus, frozenset(mode for mode, form in forms if form.runs_on(first)))


def sections(machine: Machine, dry: bool) -> Iterator[Section]:
    """Every section, on any machine the same names in the same order. ``dry``: the smallest work
    that takes the same way.
    """
    for mode in ACTIVATION_MODES:
        yield verdict_section(mode, machine)
    yield ops_section(machine, dry)
    for gpus in GPU_COUNTS:
        if gpus > 1:
            yield exchange_section(gpus, machine, dry)
        yield from decode_sections(gpus, machine, dry)
    yield from geometry_sections(machine, dry)
    for mode in ACTIVATION_MODES:
        yield from model_sections(mode, machine, dry)


def verdict_section(mode: ActivationMode, machine: Machine) -> Section:
    """The checks of the native kernels for these activations, anew."""
    name = f"verdict {mode}"
    if mode not in machine.native:
        return skipped(name, f"found {_gpus(machine.gpus)}, none that these kernels are made for")
    return Section(name, lambda: _verdict(NATIVE_FORMS[mode], torch.device("cuda", 0)))


def ops_section(machine: Machine, dry: bool) -> Section:
    """``bench ops``: portable kernels, and native ones where the GPU has them."""
    name = "ops"
    if machine.gpus == 0:
        return skipped(name, f"found {_gpus(machine.gpus)}")
    only = " --only kv_write" if dry else ""
    return _command(name, f"{_BENCH} ops{only}", "--out", dry)


def exchange_section(gpus: int, machine: Machine, dry: bool) -> Section:
    """Words between the ranks of tensor parallelism, a million times beside copies."""
    name = f"exchange on {_gpus(gpus)}"
    if machine.gpus < gpus:
        return skipped(name, f"found {_gpus(machine.gpus)}")
    count = 1000 if dry else 1_000_000
    line = f"dsv4.validate.exchange --gpus {gpus} --exchanges {count}"
    return _command(name, line, "--json", dry)


def decode_sections(gpus: int, machine: Machine, dry: bool) -> Iterator[Section]:
    """The demo checkpoint on this many GPUs: whether every decode form gives the eager bits, and
    how long its tokens take, the latter on a CPU where there is no GPU.
    """
    checked = f"decode forms on {_gpus(gpus)}"
    timed = f"demo on {_gpus(gpus)}"
    found = f"found {_gpus(machine.gpus)}"
    if machine.gpus >= gpus:
        yield _command(checked, f"dsv4.validate.graph_readiness --gpus {gpus}", "--json", dry)
    else:
        yield skipped(checked, found)
    if gpus > max(1, machine.gpus):
        yield skipped(timed, found)
        return
    sizes = " --prompt-tokens 16 --decode-tokens 4 --repeats 1" if dry else ""
    line = f"{_BENCH} engine --device {machine.device} --gpus {gpus}{sizes}"
    yield _command(timed, line, "--out", dry)


def geometry_sections(machine: Machine, dry: bool) -> Iterator[Section]:
    """Random weights of the published geometries: prefill and every decode form, with the op table
    that "auto" takes; on one GPU also with the portable kernels, and with rounded activations.
    """
    flash = f"v4-flash on {_gpus(1)}"
    for gpus in GPU_COUNTS:
        yield _geometry(f"v4-flash on {_gpus(gpus)}", "v4-flash", gpus, machine, dry)
    yield _geometry(f"{flash}, ops cuda", "v4-flash --ops cuda", 1, machine, dry)
    for mode, layout in (("fp8", "native"), ("nvfp4", "nvfp4-experts")):
        name = f"{flash}, {mode}"
        if mode in machine.native:
            rounded = f"v4-flash --format {layout} --prefill-activations {mode}"
            yield _geometry(name, rounded, 1, machine, dry)
        else:
            yield skipped(name, f"found {_gpus(machine.gpus)}, none with kernels for {mode}")
    most = max(GPU_COUNTS)
    yield _geometry(f"v4-pro on {_gpus(most)}", "v4-pro", most, machine, dry)


def _geometry(name: str, flags: str, gpus: int, machine: Machine, dry: bool) -> Section:
    if machine.gpus < gpus:
        return skipped(name, f"found {_gpus(machine.gpus)}")
    sizes = "--prompts 2048 8192 --positions 1024 8192"
    if dry:
        sizes = f"--layers {max(4, gpus)} --prompts 64 --positions 64 --decode-tokens 4"
    line = f"{_BENCH} engine --geometry {flags} --gpus {gpus} {sizes}"
    return _command(name, line, "--out", dry)


def model_sections(mode: ActivationMode, machine: Machine, dry: bool) -> Iterator[Section]:
    """The demo checkpoint with these activations: every layer beside the torch ops, the cosine of
    the whole model, and its evaluation. Where no kernels are made for them the torch ops compute
    what they would.
    """
    ops = "auto" if mode == "bf16" or mode in machine.native else "torch"
    flags = f"--device {machine.device} --ops {ops} --prefill-activations {mode}"
    tokens = 12 if dry else 512
    decode = "--chunk 1 --chunk 8 " if mode == "bf16" else ""
    sizes = f"--tokens {tokens} {decode}--chunk {tokens}"
    line = f"{_LAYERS} {flags} {sizes} --threshold {_THRESHOLDS[mode]}"
    yield _command(f"layers {mode}", line, "--json", dry)
    sizes = f"--random-tokens {tokens} --chunk {tokens}"
    line = f"{_COSINE} {flags} {sizes} --threshold {_ANY_ROUNDING}"
    yield _command(f"cosine {mode}", line, "--json", dry)
    name = f"evaluation {mode}"
    if find_spec(_TRAINING) is None:
        yield skipped(name, "the demo's evaluation is not installed")
        return
    limit = "--limit 1 --task capitals" if dry else "--limit 20"
    yield _command(name, f"{_TRAINING}.evaluate {flags} {limit}", "--json", dry)


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _command(name: str, line: str, flag: str, dry: bool) -> Section:
    return command_section(name, line, flag, _DRY_LIMIT_SECONDS if dry else _LIMIT_SECONDS)


def _verdict(form: NativeForm, device: torch.device) -> Finding:
    verdict = verdict_for(form.checks, device, anew=True)
    return Finding("done" if verdict.passed else "failed", verdict.complaint, _results(verdict))


def _results(verdict: Verdict) -> list[dict[str, Any]]:
    return [asdict(result) for result in verdict.results]


def machine_record() -> dict[str, Any]:
    """What the GPUs are: nothing that tells one machine of a kind from another."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "driver": driver_version(),
        "gpus": [
            {
                "name": gpu.name,
                "compute_capability": f"{gpu.major}.{gpu.minor}",
                "multiprocessors": gpu.multi_processor_count,
                "memory_bytes": gpu.total_memory,
                "l2_bytes": gpu.L2_cache_size,
            }
            for gpu in gpus
        ],
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags. Raises ``UserError``, also for a file that cannot be written."""
    parser = OneLineParser(
        prog="python -m dsv4.validate.blackwell_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="the smallest sizes, also on other GPUs or none; what cannot run says why",
    )
    parser.add_argument(
        "--json",
        type=path,
        default=DEFAULT_FILE,
        metavar="FILE",
        help="the report (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    refuse_shared_files([], [("--json", options.json)], also=("the demo", CHECKPOINT))
    check_output("--json", options.json)
    return options


@command
def main(argv: list[str] | None = None) -> int:
    """The command: 1 when a section failed."""
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments)
    anonymous = Anonymiser.of_this_machine()
    where = provenance("python -m dsv4.validate.blackwell_report")
    head = {"format": FORMAT, "dry_run": options.dry_run, **where, **machine_record()}
    records: list[dict[str, Any]] = []

    def write() -> None:
        report = anonymous({**head, "sections": records})
        write_output("--json", options.json, record_text(report))

    for section in sections(Machine.found(), options.dry_run):
        records.append(section.record())
        last = records[-1]
        reason = "" if last["reason"] is None else f": {last['reason']}"
        say(f"{last['name']}: {last['status']} after {last['seconds']} s{reason}")
        if options.json != STDOUT:
            write()
    if options.json == STDOUT:
        write()
    return 1 if any(record["status"] == "failed" for record in records) else 0


if __name__ == "__main__":
    run_program(main)
