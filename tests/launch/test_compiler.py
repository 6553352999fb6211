"""The compiler without a GPU: every architecture, errors, and the cache on disk."""

import hashlib
import importlib.metadata
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from dsv4.launch import compiler, signature
from dsv4.launch.compiler import cached_cubin, compile_ahead, compile_source
from dsv4.launch.constants import FORMAT_NAME, RowCode
from dsv4.launch.kernel import Defines, Kernel
from dsv4.launch.target import ARCHITECTURES
from tests.ops.sass import count, disassemble, resources

SOURCE = 'extern "C" __global__ void scale(float* x) { x[threadIdx.x] = rsqrtf(x[threadIdx.x]); }'


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An operation's folder with one small kernel, in place of those of ``dsv4/ops``."""
    folder = tmp_path / "ops" / "scale"
    folder.mkdir(parents=True)
    (folder / "scale.cu").write_text(SOURCE)
    monkeypatch.setattr(compiler, "source_path", lambda source: tmp_path / "ops" / f"{source}.cu")
    monkeypatch.setattr(compiler, "OPS", tmp_path / "ops")
    monkeypatch.setattr(compiler, "_fixed_key", compiler._fixed_key.__wrapped__)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(folder))
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_kernel_compiles_for_every_architecture(architecture: str) -> None:
    compiled = compile_source("scale/scale", architecture)
    assert compiled.cubin[:4] == b"\x7fELF"
    registers, spills = resources(compiled.log)["scale"]
    assert 0 < registers < 128
    assert spills == 0


def test_the_disassembly_shows_the_instructions() -> None:
    assert count(disassemble("scale/scale", "sm_90a"), "MUFU.RSQ") > 0


def test_a_source_that_does_not_compile_names_the_file_and_the_line(sources: Path) -> None:
    (sources / "wrong.cu").write_text("__global__ void f() { undefined_name(); }")
    with pytest.raises(Exception, match=r"wrong\.cu\(1\): error: identifier .undefined_name"):
        compile_source("scale/wrong", "sm_90a")


def test_sources_see_the_enums_of_python(sources: Path) -> None:
    checks = [f"static_assert(ROW_{code.name} == {code.value});" for code in RowCode]
    checks += [
        f"static_assert({name} >= 0 && {name}_STAGE_SCALE_BYTES >= 0);"
        for name in FORMAT_NAME.values()
    ]
    checks += ["static_assert(MAX_DECODE_TOKENS == 8);"]
    (sources / "enums.cu").write_text("\n".join([*checks, SOURCE]))
    compile_source("scale/enums", "sm_90a")


def test_every_header_source_and_define_changes_the_entry(sources: Path, cache: Path) -> None:
    (sources / "h.cuh").write_text("2")

    def entry(architecture: str = "sm_90a", defines: tuple[tuple[str, int], ...] = ()) -> Path:
        return compiler._cache_path("scale/scale", architecture, defines)

    entries = {entry(), entry("sm_100a"), entry(defines=(("N", 1),))}
    (sources / "h.cuh").write_text("3")
    entries.add(entry())
    (sources / "scale.cu").write_text("4")
    entries.add(entry())
    assert len(entries) == 5


@pytest.mark.parametrize("package", ["cuda-core", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"])
def test_another_compiler_changes_every_entry(
    package: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The NVRTC that compiles, the bindings that pass its options, and the headers it includes."""
    before = compiler._cache_path("scale/scale", "sm_90a", ())
    installed = importlib.metadata.version

    def updated(name: str) -> str:
        return "99.0" if name == package else installed(name)

    monkeypatch.setattr(importlib.metadata, "version", updated)
    assert compiler._cache_path("scale/scale", "sm_90a", ()) != before


def test_machine_code_is_stored_whole_and_read_back(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = cached_cubin("scale/scale", "sm_90a", ())
    (file,) = cache.iterdir()
    content = file.read_bytes()
    assert hashlib.sha256(content[32:]).digest() == content[:32]
    monkeypatch.setattr(compiler, "compile_source", None)
    assert cached_cubin("scale/scale", "sm_90a", ()) == cubin


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 5000])
def test_a_damaged_entry_is_compiled_again(cache: Path, damage: bytes) -> None:
    cubin = cached_cubin("scale/scale", "sm_90a", ())
    (file,) = cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage)
    assert len(cached_cubin("scale/scale", "sm_90a", ())) == len(cubin)
    assert len(file.read_bytes()) == len(good)


def test_a_folder_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    compile_ahead({(Kernel("scale/scale", "scale"), "sm_90a")})
    # This process needs to compile it once.
    monkeypatch.setattr(compiler, "compile_source", None)
    assert cached_cubin("scale/scale", "sm_90a", ())[:4] == b"\x7fELF"


def test_compiling_ahead_compiles_what_is_missing_once_and_says_how_far_it_is(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = [Kernel("scale/scale", "scale", (("N", n),)) for n in range(3)]
    seen: list[tuple[int, int]] = []
    compile_ahead({(variants[0], "sm_90a")})
    # Entries of one source and defines are one compilation.
    twice = [Kernel("scale/scale", "other", (("N", 1),)), *variants]
    compile_ahead([(kernel, "sm_90a") for kernel in twice], lambda *at: seen.append(at))
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setattr(compiler, "compile_source", None)
    compile_ahead([(kernel, "sm_90a") for kernel in twice], lambda *at: seen.append(at))
    assert len(seen) == 3


def test_an_error_ends_what_is_not_begun(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Defines] = []

    def failing(_source: str, _architecture: str, defines: Defines) -> None:
        begun.append(defines)
        time.sleep(0.05)
        raise RuntimeError("does not compile")

    monkeypatch.setattr(compiler, "compile_source", failing)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    kernels = [(Kernel("scale/scale", "scale", (("N", n),)), "sm_90a") for n in range(40)]
    with pytest.raises(RuntimeError, match="does not compile"):
        compile_ahead(kernels)
    assert len(begun) < 20


def test_threads_find_the_compiler_imported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that import cuda.core at the same time see half of it."""
    callers: list[threading.Thread] = []
    imported = compiler._cuda_core

    def core() -> object:
        callers.append(threading.current_thread())
        return imported()

    monkeypatch.setattr(compiler, "_cuda_core", core)
    compile_ahead({(Kernel("scale/scale", "scale"), "sm_90a")})
    assert callers[0] is threading.main_thread()


@pytest.mark.parametrize("places", [("wheel", "toolkit"), ("wheel",), ("toolkit",), ()])
def test_cuda_headers_are_those_of_the_wheel_or_of_a_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: tuple[str, ...]
) -> None:
    folders = {"wheel": tmp_path / "nvidia" / "cu13" / "include", "toolkit": tmp_path / "include"}
    for place in places:
        folders[place].mkdir(parents=True)
        (folders[place] / "cuda_fp16.h").touch()
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if places:
        found = folders[places[0]]
        assert compiler._cuda_headers.__wrapped__() == (str(found), str(found / "cccl"))
        return
    with pytest.raises(RuntimeError, match=f"^CUDA headers: found none in {folders['wheel']} or"):
        compiler._cuda_headers.__wrapped__()


def test_machine_code_on_disk_serves_another_process(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = cached_cubin("scale/scale", "sm_90a", ())
    compiler._compiled.cache_clear()
    monkeypatch.setattr(compiler, "compile_source", None)
    assert cached_cubin("scale/scale", "sm_90a", ()) == cubin


def test_kernels_of_the_package_are_found_by_operation_and_name() -> None:
    assert signature.source_path("norm/rms_norm").is_file()


def test_no_device_code_asks_for_its_architecture() -> None:
    """What differs is a define, so that every form compiles for and runs on every architecture."""
    sources = [path for path in signature.OPS.glob("*/*") if path.suffix in (".cu", ".cuh")]
    assert len(sources) > 30
    assert [path.name for path in sources if "__CUDA_ARCH__" in path.read_text()] == []


@pytest.mark.parametrize(
    ("failure", "seen"),
    [
        (OSError(28, "No space left on device"), nullcontext()),
        (KeyboardInterrupt(), pytest.raises(KeyboardInterrupt)),
    ],
    ids=["full", "interrupted"],
)
def test_what_cannot_be_kept_leaves_nothing_behind(
    failure: BaseException,
    seen: AbstractContextManager[object],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(path: Path, content: bytes) -> int:
        path.touch()
        raise failure

    monkeypatch.setattr(Path, "write_bytes", fail)
    with seen:
        compiler.keep_file(cache / "a.cubin", b"code")
    assert list(cache.iterdir()) == []
