"""The bridge between torch and CuTe DSL: compiles a GEMM once per configuration and calls it with
torch tensors.

The compiled function takes torch tensors through TVM FFI, runs on their device and on torch's
current stream there, and costs about 5 us of host time per call. Object files are kept beside the
cubins of ``dsv4.launch.compiler``, named by everything that decides the machine code and by their
own digest: one that was cut short counts as absent.
"""

import functools
import hashlib
import importlib.metadata
import tempfile
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from dsv4.launch.compiler import cache_folder
from dsv4.launch.kernel import ceil_div
from dsv4.ops.linear.cutedsl.hopper_gemm import GemmConfig, HopperGemm
from dsv4.weights.quant import QuantFormat

# These kernels are for Hopper only; the compiler is told, so that it needs no GPU to find out.
ARCHITECTURE = "sm_90a"
_FUNCTION = "gemm"
_OPTIONS = f"--enable-tvm-ffi --gpu-arch {ARCHITECTURE}"
# (tile_tokens, warpgroups, nanoseconds per 64 columns), measured on an H200 with NVFP4
# (docs/kernels/linear.md); of equals the first is taken.
_TILES = ((256, 2, 640), (128, 2, 420), (64, 2, 375), (64, 1, 260), (32, 1, 250), (16, 1, 245))
DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float32: cutlass.Float32}


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
    return load(GemmConfig(format, DTYPES[out_dtype], *tile, multiprocessors))


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
def load(config: GemmConfig):
    """The compiled kernel of ``config``, from disk where an earlier process left it."""
    folder = cache_folder()
    key = _key(config)
    for path in folder.glob(f"{_FUNCTION}-{key}-*.o"):
        if path.stem.endswith(_digest(path.read_bytes())):
            return _module(path)[_FUNCTION]
    compiled = compile_gemm(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            written = Path(work) / f"{_FUNCTION}.o"
            compiled.export_to_c(str(written), _FUNCTION)
            written.replace(folder / f"{_FUNCTION}-{key}-{_digest(written.read_bytes())}.o")
    except OSError:
        # A folder that cannot be written only costs the next process its time.
        pass
    return compiled


@functools.cache
def _module(path: Path):
    """The loaded object file; the cache keeps it alive as long as its functions."""
    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)


def _key(config: GemmConfig) -> str:
    versions = [
        importlib.metadata.version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")
    ]
    digest = hashlib.sha256(repr((type(config).__name__, config, _OPTIONS, versions)).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


@functools.cache
def compile_gemm(config: GemmConfig, more_options: str = ""):
    """The compiled kernel of ``config``; needs no GPU."""
    tokens = cute.sym_int32()
    k = cute.sym_int32(divisibility=64)
    features = cute.sym_int32(divisibility=64)
    strides = cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1
    x = make_fake_tensor(cutlass.BFloat16, (tokens, cute.sym_int32(), k), strides, assumed_align=16)
    y = make_fake_tensor(
        config.out_dtype, (tokens, features), (cute.sym_int64(divisibility=8), 1), assumed_align=16
    )
    weight = _bytes(4)
    block_scale = weight
    global_scale = weight
    if config.format is QuantFormat.FP8_BLOCK128:
        columns = cute.sym_int32()
        block_scale = make_fake_tensor(
            cutlass.Float32, (cute.sym_int32(), columns), (columns, 1), assumed_align=4
        )
    elif config.format is not QuantFormat.BF16:
        block_scale = _bytes(4)
    if config.format is QuantFormat.NVFP4:
        global_scale = make_fake_tensor(cutlass.Float32, (1,), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"{_OPTIONS} {more_options}".strip()
    return cute.compile(
        HopperGemm(config), x, weight, block_scale, global_scale, y, stream, options=options
    )


def _bytes(rank: int):
    """A contiguous uint8 tensor of sizes of its own, 16-byte aligned."""
    shape = tuple(cute.sym_int32() for _ in range(rank))
    return make_fake_compact_tensor(
        cutlass.Uint8, shape, stride_order=tuple(range(rank))[::-1], assumed_align=16
    )
