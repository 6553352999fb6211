"""The bridge between torch and CuTe DSL: compiles a kernel once per configuration and architecture
and calls it with torch tensors.

The compiled function takes torch tensors through TVM FFI, runs on their device and on torch's
current stream there, and costs about 5 us of host time per call. Object files are kept beside the
cubins of ``dsv4.launch.compiler``, named by everything that decides the machine code, that of the
host included, and by their own digest: one that was cut short, or cannot be read, counts as absent.
"""

import functools
import hashlib
import importlib.metadata
import platform
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream

from dsv4.integers import ceil_div
from dsv4.launch.compiler import cache_folder, keep_file
from dsv4.ops.linear.cutedsl.hopper_gemm import GemmConfig, HopperGemm
from dsv4.weights.quant import QuantFormat

_HOPPER = "sm_90a"
_FUNCTION = "gemm"
_PROCESSOR_FILE = Path("/proc/cpuinfo")
# (tile_tokens, warpgroups, nanoseconds per 64 columns), measured on an H200 with NVFP4
# (docs/kernels/linear.md); of equals the first is taken.
_TILES = ((256, 2, 640), (128, 2, 420), (64, 2, 375), (64, 1, 260), (32, 1, 250), (16, 1, 245))
DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float32: cutlass.Float32}


class Kernel(Protocol):
    """A kernel of one configuration: traced when it is called with ``signature()`` and a stream."""

    def __call__(self, *arguments: Any) -> None: ...

    def signature(self) -> tuple[Any, ...]:
        """Fake tensors and numbers for all arguments but the stream."""
        ...


class KernelType(Protocol):
    """A class of kernels: makes one of a hashable configuration whose ``repr`` says all of it."""

    __name__: str

    def __call__(self, config: Any) -> Kernel: ...


def gemm_for(
    format: QuantFormat,
    out_dtype: torch.dtype,
    tokens: int,
    features: int,
    groups: int,
    multiprocessors: int,
):
    """The compiled kernel for one problem size, called with (x, weight, block_scale, global_scale,
    y).
    """
    tile = choose_tile(tokens, features // groups, groups, multiprocessors)
    config = GemmConfig(format, DTYPES[out_dtype], *tile, multiprocessors)
    return load(HopperGemm, config, _HOPPER)


def choose_tile(
    tokens: int, features: int, groups: int, multiprocessors: int
) -> tuple[int, int, int]:
    """(tile_tokens, warpgroups, cluster) that takes the least time for ``groups`` products of
    ``features``.

    The same for all numbers of tokens that have equally many sixteens.
    """

    def nanoseconds(tile: tuple[int, int, int]) -> int:
        tile_tokens, warpgroups, step = tile
        tiles = ceil_div(tokens, tile_tokens) * ceil_div(features, 64 * warpgroups) * groups
        return ceil_div(tiles, multiprocessors) * step

    tiles = [tile for tile in _TILES if groups == 1 or features % (64 * tile[1]) == 0]
    tile_tokens, warpgroups, _ = min(tiles, key=nanoseconds)
    # Two blocks share a token tile where it pays and every pair is whole.
    cluster = 2 if tile_tokens == 256 and features % 256 == 0 else 1
    return tile_tokens, warpgroups, cluster


@functools.cache
def load(kernel: KernelType, config: Any, architecture: str):
    """The compiled kernel of ``config``, from disk where an earlier process left it."""
    folder = cache_folder()
    key = _key(kernel, config, architecture)
    for path in folder.glob(f"{_FUNCTION}-{key}-*.o"):
        if _is_whole(path):
            return _module(path)[_FUNCTION]
    compiled = compile_kernel(kernel, config, architecture)
    # A disk that cannot be written only costs the next process its time. The object file is made
    # where systems clean up behind processes that were killed.
    with suppress(OSError), tempfile.TemporaryDirectory() as work:
        written = Path(work) / f"{_FUNCTION}.o"
        compiled.export_to_c(str(written), _FUNCTION)
        content = written.read_bytes()
        keep_file(folder / f"{_FUNCTION}-{key}-{_digest(content)}.o", content)
    return compiled


@functools.cache
def compile_kernel(kernel: KernelType, config: Any, architecture: str, more_options: str = ""):
    """The kernel of ``config`` for ``architecture``, which the compiler is told: no GPU is needed,
    and no environment variable decides.
    """
    made = kernel(config)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"{_options(architecture)} {more_options}".strip()
    return cute.compile(made, *made.signature(), stream, options=options)


def _options(architecture: str) -> str:
    return f"--enable-tvm-ffi --gpu-arch {architecture}"


@functools.cache
def _module(path: Path):
    """The loaded object file; the cache keeps it alive as long as its functions."""
    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)


def _key(kernel: KernelType, config: Any, architecture: str) -> str:
    versions = [
        importlib.metadata.version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")
    ]
    facts = (kernel.__name__, config, _options(architecture), versions, host())
    digest = hashlib.sha256(repr(facts).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def host() -> tuple[str, str]:
    """What the half of an object file that launches is machine code for: the processor's kind, and
    the instructions it has. A folder may be shared by hosts that differ, around equal GPUs.
    """
    try:
        lines = _PROCESSOR_FILE.read_text(encoding="utf-8").split("\n")
    except OSError:
        lines = []
    has = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.machine(), has


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return path.stem.endswith(_digest(content))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
