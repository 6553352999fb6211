// The sampled token, for the host (a ring in pinned memory) and for the next step.
#include "common.cuh"

constexpr int64 NAN_TOKEN = -1;

extern "C" __global__ void store_token(const int64* token, const int64* position, int64* next,
                                       int64* ring, const int* nan, int slots) {
    pdl_wait();
    if (threadIdx.x > 0) return;
    int64 sampled = *token;
    // Host memory, which kernels of other devices may have written.
    int met_nan;
    asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(met_nan) : "l"(nan));
    if (met_nan) sampled = NAN_TOKEN;
    ring[*position % slots] = sampled;
    *next = sampled < 0 ? 0 : sampled;
}
