// torch: hadamard(x) without its factor, of one row in the registers of a warp
// (dsv4/ops/hadamard.py): lane l of Lanes holds the Count consecutive values from l · Count on.
#pragma once
#include "common.cuh"

// Butterflies in the order of the torch op: distance 1 first.
template <int Lanes, int Count>
__device__ __forceinline__ void warp_hadamard(float (&values)[Count]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int step = 1; step < Count; step *= 2) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            if (i & step) continue;
            const float a = values[i], b = values[i + step];
            values[i] = a + b, values[i + step] = a - b;
        }
    }
#pragma unroll
    for (int step = 1; step < Lanes; step *= 2) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const float other = __shfl_xor_sync(~0u, values[i], step);
            values[i] = lane & step ? other - values[i] : values[i] + other;
        }
    }
}
