"""A copy of ``dsv4`` whose kernels delay a warp at random in front of what others wait for, or what
waits for others: words, mbarriers, barriers of blocks and clusters, launches.
"""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import dsv4

PACKAGE = Path(dsv4.__file__).parent
# True. One call in 16 takes up to 4 us, one in 16,384 up to 33: longer than what follows in a step.
RANDOM_DELAY = """
__device__ __forceinline__ bool random_delay() {
    unsigned clock, processor;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
    asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
    unsigned random = clock + 0x9E3779B9u * (processor * 64 + threadIdx.x / 32);
    random = (random ^ random >> 16) * 0x85EBCA6Bu;
    random = (random ^ random >> 13) * 0xC2B2AE35u;
    random ^= random >> 16;
    if (random % 16 == 0) __nanosleep(random % 16384 ? random >> 20 : random >> 17);
    return true;
}
"""
BEGIN = "constexpr int WARP = 32;\n"
MEETINGS = (
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    "st.relaxed.gpu",
    "st.relaxed.sys.global.u64",
    "ld.relaxed.gpu",
    "ld.relaxed.sys.global",
    "red.relaxed.gpu",
    "red.relaxed.cluster",
    "mbarrier.arrive",
    "cp.async.mbarrier.arrive",
    "st.async",
    "barrier.cluster.arrive",
    "barrier.cluster.wait",
)
_STATEMENT = re.compile(rf'asm volatile\(\s*"(?:{"|".join(map(re.escape, MEETINGS))})')
_BARRIER = "__syncthreads();"


def delayed(source: str) -> str:
    """The text of a source whose meetings are delayed."""
    source = _STATEMENT.sub(lambda found: f"if (random_delay()) {found[0]}", source)
    source = source.replace(_BARRIER, f"random_delay(), {_BARRIER}")
    return source.replace(BEGIN, BEGIN + RANDOM_DELAY)


def sources(package: Path) -> Iterable[Path]:
    """Files with device code."""
    return sorted([*package.glob("ops/*/*.cuh"), *package.glob("ops/*/*.cu")])


def write_delayed_package(folder: Path) -> None:
    """Makes ``folder/dsv4``."""
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sources(copy):
        path.write_text(delayed(path.read_text()))
