"""Compiles CUDA C++ with NVRTC and keeps the cubins on disk; needs no GPU.

The cache key covers everything that decides the machine code: the source, every device header, this
file with its options, the shared constants, the defines and the compiler's version. Entries are
written to a temporary name and renamed, so that processes can share the folder; an entry that
cannot be read counts as absent. ``DSV4_KERNEL_CACHE`` names the folder (default
``~/.cache/dsv4/kernels``).
"""

import functools
import hashlib
import importlib
import importlib.metadata
import io
import os
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.launch.constants import device_header
from dsv4.launch.kernel import Defines, Kernel
from dsv4.launch.signature import OPS, SHARED_HEADERS, source_path
from dsv4.on_failure import OnFailure
from dsv4.progress import Progress

_COMPILER_PACKAGES = ("cuda-core", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")


@dataclass(frozen=True)
class Compiled:
    """Machine code of one ``.cu`` file. ``log`` is the assembler's resource report: registers,
    stack, spills.
    """

    cubin: bytes
    log: str


def compile_source(source: str, architecture: str, defines: Defines = ()) -> Compiled:
    """Compiles ``dsv4/ops/<source>.cu`` for ``architecture``.

    A source that does not compile raises cuda.core's error, which holds the compiler's messages.
    """
    text, options = translation_unit(source, architecture, defines)
    log = io.StringIO()
    code = _cuda_core().Program(text, "c++", options).compile("cubin", logs=log)
    return Compiled(bytes(code.code), log.getvalue())


def translation_unit(source: str, architecture: str, defines: Defines) -> tuple[str, Any]:
    """What the compiler gets for ``dsv4/ops/<source>.cu``: the text, and cuda.core's
    ``ProgramOptions``.
    """
    path = source_path(source)
    options = _cuda_core().ProgramOptions(
        name=path.name,
        std="c++17",
        arch=architecture,
        include_path=[str(path.parent), str(SHARED_HEADERS), *_cuda_headers()],
        define_macro=[(name, str(value)) for name, value in defines] or None,
        ptxas_options=["-v"],
        # Some versions take a generic lambda inside a kernel for host code otherwise.
        device_as_default_execution_space=True,
        # The folder is the cache: what the driver keeps besides comes without the assembler's log.
        no_cache=True,
    )
    text = f'{device_header()}#line 1 "{path.name}"\n{path.read_text(encoding="utf-8")}'
    return text, options


def cached_cubin(source: str, architecture: str, defines: Defines) -> bytes:
    """The machine code of a source, compiled unless the folder holds it."""
    path = _cache_path(source, architecture, defines)
    stored = _stored(path)
    if stored is not None:
        return stored
    cubin = _compiled(path, source, architecture, defines)
    keep_file(path, hashlib.sha256(cubin).digest() + cubin)
    return cubin


@functools.cache
def _compiled(path: Path, source: str, architecture: str, defines: Defines) -> bytes:
    """Once in a process, also where the folder cannot be written. ``path``, where it would be kept,
    goes with the contents of all files.
    """
    return compile_source(source, architecture, defines).cubin


def compile_ahead(kernels: Iterable[tuple[Kernel, str]], progress: Progress | None = None) -> None:
    """Compiles what the folder lacks of (kernel, architecture) pairs, on all cores.

    ``progress(done, total)`` counts only what had to be compiled.
    """
    units = {(kernel.source, architecture, kernel.defines) for kernel, architecture in kernels}
    missing = [unit for unit in sorted(units) if _stored(_cache_path(*unit)) is None]
    if not missing:
        return
    if progress is not None:
        progress(0, len(missing))
    _cuda_core()
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        # Else whoever ends this waits for all that is still to be compiled.
        OnFailure(functools.partial(pool.shutdown, wait=False, cancel_futures=True)),
    ):
        compiling = [pool.submit(cached_cubin, *unit) for unit in missing]
        for done, future in enumerate(as_completed(compiling), 1):
            future.result()
            if progress is not None:
                progress(done, len(missing))


def is_installed() -> bool:
    """Whether the packages of the compiler are there; an engine of torch ops runs without."""
    try:
        _versions()
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def cache_folder() -> Path:
    """Where cubins are kept between processes."""
    return Path(os.environ.get("DSV4_KERNEL_CACHE") or Path.home() / ".cache" / "dsv4" / "kernels")


def keep_file(path: Path, content: bytes) -> None:
    """Writes whole or not at all; a folder that cannot be written only costs the next process its
    time.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder, path.name)
            whole.write_bytes(content)
            whole.replace(path)
    except OSError:
        return


def _stored(path: Path) -> bytes | None:
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest = stored[:32]
    cubin = stored[32:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _cache_path(source: str, architecture: str, defines: Defines) -> Path:
    key = repr((source, architecture, defines, _fixed_key(), source_path(source).read_bytes()))
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    return cache_folder() / f"{source.rpartition('/')[2]}-{digest}.cubin"


@functools.cache
def _cuda_core() -> Any:
    """Imported where it is used, since recording and planning work without it; before threads use
    it, which must not import it at the same time.
    """
    return importlib.import_module("cuda.core")


@functools.cache
def _fixed_key() -> str:
    """Shared by all sources: headers, constants, options and the compiler."""
    digest = hashlib.sha256(device_header().encode())
    for path in (Path(__file__), *sorted(OPS.glob("*/*.cuh"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for version in _versions():
        digest.update(version.encode())
    return digest.hexdigest()


def _versions() -> list[str]:
    return [importlib.metadata.version(name) for name in _COMPILER_PACKAGES]


@functools.cache
def _cuda_headers() -> tuple[str, ...]:
    """Include folders of the pip-installed CUDA headers, or of a toolkit named by ``CUDA_HOME``."""
    wheel = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "include"
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "include"
    for folder in (wheel, toolkit):
        if (folder / "cuda_fp16.h").is_file():
            return str(folder), str(folder / "cccl")
    raise RuntimeError(
        f"CUDA headers: found none in {wheel} or {toolkit}, expected those of nvidia-cuda-runtime"
    )
