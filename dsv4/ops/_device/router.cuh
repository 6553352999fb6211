// What a router makes of the logits of a token: scores, the P best experts or those of a table, and
// their weights. One warp per token; lane l holds the experts l, l + 32, ..., and after the choice
// the l-th chosen one.
//
// Defines: EXPERTS (X), EXPERTS_PER_TOKEN (P), HASH (1: the experts come from a table).
#pragma once
#include "common.cuh"

// Experts of a lane.
constexpr int PER_LANE = (EXPERTS + WARP - 1) / WARP;

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
__device__ __forceinline__ int64 listed_expert(const int64* table_VP, int64 token, int V) {
    const int p = threadIdx.x % WARP;
    const int64 row = min(max(token, 0ll), int64(V - 1));
    return p < EXPERTS_PER_TOKEN ? table_VP[row * EXPERTS_PER_TOKEN + p] : -1;
}

// Every lane's biases: constants. Requested here, whatever the compiler thinks of it.
__device__ __forceinline__ void load_bias(float (&bias)[PER_LANE], const float* bias_X, int X) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int expert = i * WARP + threadIdx.x % WARP;
        bias[i] = 0.0f;
        if (expert < EXPERTS)
            asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(bias[i]) : "l"(bias_X + expert));
    }
}

// The key of every expert of the lane, 0 where there is none.
__device__ __forceinline__ void sort_keys(unsigned (&keys)[PER_LANE],
                                          const float (&score)[PER_LANE],
                                          const float (&bias)[PER_LANE]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
        keys[i] = i * WARP + lane < EXPERTS ? sort_key(expf(score[i]) + bias[i]) : 0;
}

// The lane's largest key.
__device__ __forceinline__ unsigned largest_key(const unsigned (&keys)[PER_LANE]) {
    unsigned largest[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) largest[i] = keys[i];
    // As a tree: all of a round waits for it.
#pragma unroll
    for (int half = 1; half < PER_LANE; half *= 2)
#pragma unroll
        for (int i = 0; i + half < PER_LANE; i += 2 * half)
            largest[i] = max(largest[i], largest[i + half]);
    return largest[0];
}

// Lane p < P gets the expert with the p-th largest key, of equal ones the lowest expert first.
__device__ __forceinline__ int best_experts(unsigned (&keys)[PER_LANE]) {
    const int lane = threadIdx.x % WARP;
    int id = 0;
#pragma unroll 1
    for (int p = 0; p < EXPERTS_PER_TOKEN; ++p) {
        const unsigned best = __reduce_max_sync(~0u, largest_key(keys));
        unsigned expert = ~0u;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; --i)
            if (keys[i] == best) expert = i * WARP + lane;
        expert = __reduce_min_sync(~0u, expert);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (expert == i * WARP + lane) keys[i] = 0;
        if (lane == p) id = expert;
    }
    return id;
}

// The same, sooner, where no two of the largest keys are equal, which it returns: a round need not
// know whose key was the largest, and all experts are looked for behind the last one.
__device__ __forceinline__ bool best_distinct_experts(const unsigned (&keys)[PER_LANE], int& id) {
    const int lane = threadIdx.x % WARP;
    unsigned left[PER_LANE], found[EXPERTS_PER_TOKEN];
    int taken = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) left[i] = keys[i];
#pragma unroll
    for (int p = 0; p < EXPERTS_PER_TOKEN; ++p) {
        const unsigned best = __reduce_max_sync(~0u, largest_key(left));
        found[p] = ~0u;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            if (left[i] != best) continue;
            found[p] = i * WARP + lane;
            left[i] = 0;
            ++taken;
        }
    }
#pragma unroll
    for (int p = 0; p < EXPERTS_PER_TOKEN; ++p) {
        const unsigned expert = __reduce_min_sync(~0u, found[p]);
        if (lane == p) id = expert;
    }
    return __reduce_add_sync(~0u, taken) == EXPERTS_PER_TOKEN;
}

// Lane p < P gets the p-th expert of a token; `score`: log scores of all experts. `bias` matters
// only without HASH, `listed` only with it.
__device__ __forceinline__ int64 choose(const float (&score)[PER_LANE],
                                        const float (&bias)[PER_LANE], int64 listed) {
    if (HASH) return listed;
    unsigned keys[PER_LANE];
    sort_keys(keys, score, bias);
    int id = 0;
    if (!best_distinct_experts(keys, id)) id = best_experts(keys);
    return id;
}

// The weights of the chosen experts: lane p < P has the id of the p-th and gets its weight.
__device__ __forceinline__ float weigh(const float (&score)[PER_LANE], int64 id, float scaling) {
    const int lane = threadIdx.x % WARP;
    const int expert = int(min(max(id, 0ll), int64(EXPERTS - 1)));
    float chosen = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const float value = __shfl_sync(~0u, score[i], expert % WARP);
        if (expert / WARP == i) chosen = value;
    }
    const bool has = lane < EXPERTS_PER_TOKEN;
    const float value = has ? chosen : __int_as_float(0xff800000);
    const float largest = warp_max(value);
    const float share = has ? expf(value - largest) : 0.0f;
    const float total = warp_sum(share);
    return share / total * scaling;
}
