// What the indexer's scoring and selection agree on: which entries a token sees, and how scores are
// ordered.
#pragma once
#include "common.cuh"

constexpr int CSA_RATIO = 4;
// The order of −∞: entries with such a score are not selected.
constexpr unsigned LOWEST = 0x007FFFFFu;

// Complete entries among the tokens up to and including `position`.
__device__ __forceinline__ int visible_entries(int64 position, int slots) {
    const int64 complete = (position + 1) / CSA_RATIO;
    return complete < slots ? (int)complete : slots;
}

// fmaxf that gives NaN when either side is NaN, as torch does.
__device__ __forceinline__ float nan_max(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// An integer that is larger for a larger score; the same for both zeros; largest for NaN.
__device__ __forceinline__ unsigned order_of(float score) {
    if (score != score) return ~0u;
    const unsigned bits = __float_as_uint(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
