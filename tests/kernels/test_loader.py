"""The kernel loader without a GPU: compilation for every architecture, and the cache on disk."""

import hashlib
from pathlib import Path

import pytest

from dsv4.kernels.cuda import loader
from tests.kernels.sass import count, disassemble, resources

SOURCE = 'extern "C" __global__ void scale(float* x) { x[threadIdx.x] = rsqrtf(x[threadIdx.x]); }'


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources with one small kernel."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "scale.cu").write_text(SOURCE)
    monkeypatch.setattr(loader, "SOURCES", folder)
    return folder


@pytest.mark.parametrize("architecture", loader.ARCHITECTURES)
def test_a_kernel_compiles_for_every_architecture(architecture: str) -> None:
    compiled = loader.compile_source("scale", architecture)
    assert compiled.cubin[:4] == b"\x7fELF"
    registers, spills = resources(compiled.log)["scale"]
    assert 0 < registers < 128
    assert spills == 0


def test_the_disassembly_shows_the_instructions() -> None:
    assert count(disassemble("scale", "sm_90a"), "MUFU.RSQ") > 0


def test_a_source_that_does_not_compile_names_the_file_and_the_line(sources: Path) -> None:
    (sources / "wrong.cu").write_text("__global__ void f() { undefined_name(); }")
    with pytest.raises(Exception, match=r"wrong\.cu\(1\): error: identifier .undefined_name"):
        loader.compile_source("wrong", "sm_90a")


def test_every_header_and_define_changes_the_key(sources: Path) -> None:
    (sources / "a.cu").write_text("1")
    (sources / "h.cuh").write_text("2")
    keys = {loader._key("a", "sm_90a", ()), loader._key("a", "sm_100a", ()), loader._key("a", "sm_90a", (("N", 1),))}
    (sources / "h.cuh").write_text("3")
    keys.add(loader._key("a", "sm_90a", ()))
    (sources / "a.cu").write_text("4")
    keys.add(loader._key("a", "sm_90a", ()))
    assert len(keys) == 5


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(folder))
    return folder


def stored_files(cache: Path) -> list[Path]:
    return sorted(cache.glob("scale-*.cubin"))


def test_a_compiled_module_is_stored_whole_and_read_back(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader._module.__wrapped__("scale", "sm_90a", ())
    (file,) = stored_files(cache)
    content = file.read_bytes()
    assert hashlib.sha256(content[32:]).digest() == content[:32]
    assert list(cache.iterdir()) == [file]
    monkeypatch.setattr(loader, "compile_source", None)
    loader._module.__wrapped__("scale", "sm_90a", ())


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 5000])
def test_a_damaged_entry_is_compiled_again(cache: Path, damage: bytes) -> None:
    loader._module.__wrapped__("scale", "sm_90a", ())
    (file,) = stored_files(cache)
    good = file.read_bytes()
    file.write_bytes(damage)
    loader._module.__wrapped__("scale", "sm_90a", ())
    assert file.read_bytes()[:32] == hashlib.sha256(file.read_bytes()[32:]).digest()
    assert len(file.read_bytes()) == len(good)


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    loader._module.__wrapped__("scale", "sm_90a", ())
