// The sampled token, for the host (a ring in pinned memory) and for the next step.
#include "common.cuh"

extern "C" __global__ void store_token(const int64* token, const int64* position, int64* next,
                                       int64* ring, int slots) {
    pdl_wait();
    if (threadIdx.x > 0) return;
    const int64 sampled = *token;
    ring[*position % slots] = sampled;
    *next = sampled < 0 ? 0 : sampled;
}
