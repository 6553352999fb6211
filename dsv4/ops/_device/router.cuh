// What a router makes of the logits of a token: scores, the P best experts or those of a table, and
// their weights. One warp per token; lane l holds the experts l, l + 32, ..., and after the choice
// the l-th chosen one.
//
// Defines: PER_LANE (experts per lane, ceil(X / 32)), HASH (1: the experts come from a table).
#pragma once
#include "common.cuh"

// 0.5 * log(softplus(l)); below -15 softplus(l) is e^l to float32 precision, its log is l.
__device__ __forceinline__ float log_score(float logit) {
    const float softplus = log1pf(expf(-fabsf(logit))) + (logit < 0.0f ? 0.0f : logit);
    return 0.5f * (logit < -15.0f ? logit : logf(softplus));
}

// Unsigned order of floats as torch sorts them: NaN above everything, -0 equal to +0. Never 0.
__device__ __forceinline__ unsigned sort_key(float value) {
    if (value != value) return ~0u;
    const unsigned bits = __float_as_uint(value + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The entry of lane p < P in the table of a hash router. Token ids beyond the table read its first
// or last row.
__device__ __forceinline__ int64 listed_expert(const int64* table_VP, const int64* tokens_T,
                                               int token, int P, int V) {
    const int p = threadIdx.x % WARP;
    const int64 row = min(max(__ldcg(tokens_T + token), 0ll), int64(V - 1));
    return p < P ? table_VP[row * P + p] : -1;
}

// Every lane's biases: constants. Requested here, whatever the compiler thinks of it.
__device__ __forceinline__ void load_bias(float (&bias)[PER_LANE], const float* bias_X, int X) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int expert = i * WARP + threadIdx.x % WARP;
        bias[i] = 0.0f;
        if (expert < X)
            asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(bias[i]) : "l"(bias_X + expert));
    }
}

struct Choice {
    int64 id;
    float weight;
};

// `score`: log scores of all experts. `bias` matters only without HASH, `listed` only with it.
__device__ __forceinline__ Choice choose(const float (&score)[PER_LANE],
                                         const float (&bias)[PER_LANE], int64 listed, int X, int P,
                                         float scaling) {
    const int lane = threadIdx.x % WARP;
    int64 id = listed;
#if !HASH
    unsigned key[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
        key[i] = i * WARP + lane < X ? sort_key(expf(score[i]) + bias[i]) : 0;
#pragma unroll 1
    for (int p = 0; p < P; ++p) {
        unsigned best = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) best = max(best, key[i]);
        best = __reduce_max_sync(~0u, best);
        unsigned expert = ~0u;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; --i)
            if (key[i] == best) expert = i * WARP + lane;
        expert = __reduce_min_sync(~0u, expert);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (expert == i * WARP + lane) key[i] = 0;
        if (lane == p) id = expert;
    }
#endif
    const int expert = int(min(max(id, 0ll), int64(X - 1)));
    float chosen = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const float value = __shfl_sync(~0u, score[i], expert % WARP);
        if (expert / WARP == i) chosen = value;
    }
    const float value = lane < P ? chosen : __int_as_float(0xff800000);
    const float largest = warp_max(value);
    const float share = lane < P ? expf(value - largest) : 0.0f;
    const float total = warp_sum(share);
    return {id, share / total * scaling};
}
