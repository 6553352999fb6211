"""What ``pdl_wait()`` makes visible to a kernel that started while an older one still read, and so
kept in L1, the rows that the one between them writes.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.launch import compiler, signature
from dsv4.launch.kernel import Kernel, Shape
from dsv4.launch.loading import driver
from dsv4.launch.prepared import LaunchForm, PreparedLaunch
from dsv4.launch.target import ARCHITECTURES, Target, compile_target

WORDS = 8192
LOADS = {"plain": 0, "cp.async.ca": 1}
SOURCE = """
#include "common.cuh"
#include "ptx.cuh"

__device__ __forceinline__ int64 nanoseconds() {
    int64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ unsigned multiprocessor() {
    unsigned number;
    asm("mov.u32 %0, %%smid;" : "=r"(number));
    return number;
}

__device__ __forceinline__ int load(const int* address) {
#if LOAD == 0
    int value;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(address));
    return value;
#else
    __shared__ int values[1024];
    int* value = values + threadIdx.x;
    cp_async4(shared_address(value), address);
    cp_async_commit();
    cp_async_wait<0>();
    return *value;
#endif
}

__device__ __forceinline__ int count_others(const int* rows, int words, int value) {
    int others = 0;
    for (int word = threadIdx.x; word < words; word += blockDim.x) {
        others += load(rows + word) != value;
    }
    return others;
}

extern "C" __global__ void hold(const int* rows, int* stale, int64* ended, int words, int value) {
    pdl_launch();
    const int64 start = nanoseconds();
    int others = 0;
    while (nanoseconds() - start < 200000) others += count_others(rows, words, value);
    if (others != 0) atomicAdd(stale, others);
    if (threadIdx.x == 0) ended[multiprocessor()] = nanoseconds();
}

extern "C" __global__ void change(int* rows, int words, int value) {
    pdl_launch();
    pdl_wait();
    for (int word = threadIdx.x; word < words; word += blockDim.x) rows[word] = value;
}

extern "C" __global__ void read(const int* rows, int* stale, int64* began, int words, int value) {
    if (threadIdx.x == 0) began[multiprocessor()] = nanoseconds();
    pdl_wait();
    const int others = count_others(rows, words, value);
    if (others != 0) atomicAdd(stale, others);
}
"""


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels above in place of those of ``dsv4/ops``."""
    folder = tmp_path / "lines"
    folder.mkdir()
    (folder / "lines.cu").write_text(SOURCE)
    for module in (compiler, signature):
        monkeypatch.setattr(module, "source_path", lambda source: tmp_path / f"{source}.cu")
    monkeypatch.setattr(compiler, "OPS", tmp_path)
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path / "cache"))


def kernel(name: str, load: str) -> Kernel:
    return Kernel("lines/lines", name, (("LOAD", LOADS[load]),))


def launch(target: Target, shape: Shape, **values: Tensor | int) -> None:
    of = signature.signature(shape.kernel.source, shape.kernel.function)
    form = LaunchForm(of, target, shape)
    form.retarget(1, torch.cuda.current_stream().cuda_stream)
    prepared = PreparedLaunch(of, form)
    prepared.take(
        {
            name: value.data_ptr() if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
    )
    (error,) = driver().cuLaunchKernelEx(form.config, form.function, prepared.parameters, 0)
    assert error == driver().CUresult.CUDA_SUCCESS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("load", LOADS)
def test_the_kernels_compile(load: str, architecture: str) -> None:
    compiled = compiler.compile_source("lines/lines", architecture, kernel("read", load).defines)
    assert compiled.cubin


@pytest.mark.gpu
@pytest.mark.parametrize("load", LOADS)
def test_lines_that_an_older_kernel_kept_are_read_anew(load: str) -> None:
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    architecture = compile_target(properties.major, properties.minor)
    assert architecture is not None
    target = Target(device, architecture, properties.multi_processor_count)
    rows = torch.zeros(WORDS, dtype=torch.int32, device="cuda")
    stale = torch.zeros(1, dtype=torch.int32, device="cuda")
    ended, began = torch.zeros(2, 1024, dtype=torch.int64, device="cuda")
    hold, read = (
        Shape(kernel(name, load), target.multiprocessors, threads)
        for name, threads in (("hold", 1024), ("read", 256))
    )
    change = Shape(kernel("change", load), 1, 256)
    met = 0
    for value in range(1, 21):
        launch(target, hold, rows=rows, stale=stale, ended=ended, words=WORDS, value=value - 1)
        launch(target, change, rows=rows, words=WORDS, value=value)
        launch(target, read, rows=rows, stale=stale, began=began, words=WORDS, value=value)
        torch.cuda.synchronize()
        met = max(met, int(((began > 0) & (began < ended)).sum()))
    assert met > target.multiprocessors // 2
    assert int(stale) == 0
