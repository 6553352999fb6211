"""The kernel loader without a GPU: compilation for every architecture, the cache on disk, what the driver is given."""

import ctypes
import hashlib
import struct
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.launch import loader
from tests.ops.sass import count, disassemble, resources

SOURCE = 'extern "C" __global__ void scale(float* x) { x[threadIdx.x] = rsqrtf(x[threadIdx.x]); }'


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An operation's folder with one small kernel; sources named wrong and a may be added."""
    folder = tmp_path / "ops" / "scale"
    folder.mkdir(parents=True)
    (folder / "scale.cu").write_text(SOURCE)
    monkeypatch.setattr(loader, "OPS", tmp_path / "ops")
    monkeypatch.setattr(loader, "SOURCES", {name: folder / f"{name}.cu" for name in ("scale", "wrong", "a")})
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


class Driver:
    """Records what the driver is asked to launch: the words behind the pointers, as long as they are valid."""

    def __init__(self, kinds: str) -> None:
        self.kinds, self.error, self.launches = kinds, loader.driver.CUresult.CUDA_SUCCESS, []

    def launch(self, config: Any, function: object, parameters: int, extra: int) -> tuple:
        pointers = (ctypes.c_void_p * len(self.kinds)).from_address(parameters)
        types = {"p": ctypes.c_uint64, "i": ctypes.c_int32, "f": ctypes.c_float}
        # Another thread would run here, as it does when the driver lets it.
        time.sleep(0)
        found = [types[kind].from_address(pointer).value for kind, pointer in zip(self.kinds, pointers, strict=True)]
        self.launches.append((config, int(config.hStream), found))
        return (self.error,)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The driver of a kernel of a pointer, an int, a pointer, a float and an int."""
    recorded = Driver("pipfi")
    monkeypatch.setattr(loader, "_kernel", lambda *_: (SimpleNamespace(handle=1), len(recorded.kinds)))
    monkeypatch.setattr(loader.driver, "cuLaunchKernelEx", recorded.launch)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    loader._all_open.cache_clear()
    yield recorded
    loader._all_open.cache_clear()


DEVICE = torch.device("cuda:1")


def test_arguments_arrive_in_order_and_in_their_types(recorded: Driver) -> None:
    x = torch.zeros(3)
    for arguments in [(x, 7, None, 2.5, -1), (None, 2**32 - 1, x[1:], 0.0, 8), (x, 1, None, 2.5, 2**31 - 1)]:
        loader.launch("source", "function", 4, 32, *arguments, device=DEVICE)
        _, stream, (first, integer, second, real, last) = recorded.launches[-1]
        assert stream == 101
        assert [first, second] == [0 if part is None else part.data_ptr() for part in arguments[::2][:2]]
        assert (integer, real, last) == (ctypes.c_int32(arguments[1]).value, *arguments[3:])


def test_open_arguments_of_a_prepared_launch_are_given_at_each_call(recorded: Driver) -> None:
    x, y = torch.zeros(3), torch.zeros(3)
    prepared = loader.prepare("source", "function", 4, 32, torch.Tensor, 7, x, float, int, device=DEVICE)
    prepared(y, 2.5, 3)
    prepared(x, 0.5, -4)
    assert [found for *_, found in recorded.launches] == [
        [y.data_ptr(), 7, x.data_ptr(), 2.5, 3],
        [x.data_ptr(), 7, x.data_ptr(), 0.5, -4],
    ]


def test_a_prepared_launch_keeps_its_tensors(recorded: Driver) -> None:
    x = torch.zeros(3)
    alive = weakref.ref(x)
    prepared = loader.prepare("source", "function", 4, 32, x, 7, None, float, int, device=DEVICE)
    del x
    prepared(1.0, 2)
    assert alive() is not None
    del prepared
    assert alive() is None


def test_a_wrong_number_or_type_of_arguments_is_refused(recorded: Driver) -> None:
    for start in (loader.launch, loader.prepare):
        with pytest.raises(TypeError, match=r"source\.cu function: found 2 arguments, expected 5"):
            start("source", "function", 4, 32, None, 7, device=DEVICE)
    prepared = loader.prepare("source", "function", 4, 32, None, int, None, 1.0, 1, device=DEVICE)
    for arguments in [(), (1, 2), (1.5,)]:
        with pytest.raises(struct.error):
            prepared(*arguments)
    assert recorded.launches == []


def test_the_configuration_has_the_grid_the_cluster_and_the_overlap(recorded: Driver) -> None:
    arguments = (None, 1, None, 1.0, 1)
    loader.launch("source", "function", (8, 3), 64, *arguments, device=DEVICE, shared_bytes=1000, cluster=4)
    loader.launch("source", "function", 5, 64, *arguments, device=DEVICE)
    (clustered, *_), (single, *_) = recorded.launches
    assert (clustered.gridDimX, clustered.gridDimY, clustered.gridDimZ) == (8, 3, 1)
    assert (clustered.blockDimX, clustered.blockDimY, clustered.blockDimZ) == (64, 1, 1)
    assert (clustered.sharedMemBytes, clustered.numAttrs) == (1000, 2)
    assert (single.gridDimX, single.gridDimY, single.numAttrs) == (5, 1, 1)
    overlap, cluster = clustered.attrs
    assert overlap.value.programmaticStreamSerializationAllowed == 1
    dimensions = cluster.value.clusterDim
    assert (dimensions.x, dimensions.y, dimensions.z) == (4, 1, 1)


def test_an_error_of_the_driver_is_a_runtime_error(recorded: Driver) -> None:
    recorded.error = loader.driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(RuntimeError, match="^CUDA driver error: CUDA_ERROR_ILLEGAL_ADDRESS"):
        loader.launch("source", "function", 4, 32, None, 1, None, 1.0, 1, device=DEVICE)


def test_threads_that_share_a_launch_do_not_see_each_others_arguments(recorded: Driver) -> None:
    prepared = loader.prepare("source", "function", 4, 32, None, int, None, float, int, device=DEVICE)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: prepared(number, float(number), number), range(400)))
    assert sorted(found[1] for *_, found in recorded.launches) == list(range(400))
    assert all(found[1] == found[3] == found[4] for *_, found in recorded.launches)
