// Logits of one row in the shared memory of a cluster: exchanges between all of its threads, the
// noise of a draw, and what top-k and top-p keep.
//
// Defines: BLOCKS (cluster size), VALUES per thread (a multiple of 4), VECTOR (1: 16-byte loads are
// allowed). Every sum has a fixed order: equal inputs give equal results. Loops stay rolled,
// because a launch pays for every instruction that it fetches for the first time.
#pragma once
#include <math_constants.h>

#include "cluster.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP;
constexpr int SLICE = VALUES * THREADS;  // ids of a block
constexpr long long NO_TOKEN = -1;
// The noise of the filter is off by less than 1e-4, see fast_noise.
constexpr float MARGIN = 1e-3f;

struct Sums {
    float of[3];
};

// Exchanges between all threads of the cluster, numbered. They use two inboxes and two halves of
// every array in turn: a block is at most one exchange ahead of another, because every exchange
// waits for all blocks.
struct Cluster {
    uint64 inboxes[2];
    uint64 warp_keys[WARPS], keys[2][BLOCKS];
    float warp_sums[3][WARPS], sums[2][3][BLOCKS];
    float block_best[WARPS];
};

__device__ __noinline__ uint64 largest_of_all(Cluster& cluster, int exchange, uint64 key) {
    const int half = exchange % 2;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2)
        key = max(key, __shfl_xor_sync(~0u, key, offset));
    if (lane == 0) cluster.warp_keys[warp] = key;
    __syncthreads();
    if (warp == 0) {
        key = cluster.warp_keys[lane];
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2)
            key = max(key, __shfl_xor_sync(~0u, key, offset));
        if (lane == 0) expect_mail(&cluster.inboxes[half], BLOCKS * sizeof(uint64));
        if (lane < BLOCKS)
            send(&cluster.keys[half][cluster_rank()], &cluster.inboxes[half], lane, key);
    }
    wait_mail(&cluster.inboxes[half], exchange / 2);
    key = cluster.keys[half][0];
#pragma unroll
    for (int b = 1; b < BLOCKS; b++) key = max(key, cluster.keys[half][b]);
    return key;
}

// Adding a non-negative number to any thread's value never lowers a sum: the same tree adds every
// time.
__device__ __noinline__ Sums sums_of_all(Cluster& cluster, int exchange, Sums values) {
    const int half = exchange % 2;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        values.of[i] = warp_sum(values.of[i]);
        if (lane == 0) cluster.warp_sums[i][warp] = values.of[i];
    }
    __syncthreads();
    if (warp < 3) {
        const float sum = warp_sum(cluster.warp_sums[warp][lane]);
        if (threadIdx.x == 0) expect_mail(&cluster.inboxes[half], 3 * BLOCKS * sizeof(float));
        if (lane < BLOCKS)
            send(&cluster.sums[half][warp][cluster_rank()], &cluster.inboxes[half], lane, sum);
    }
    wait_mail(&cluster.inboxes[half], exchange / 2);
#pragma unroll
    for (int i = 0; i < 3; i++) {
        values.of[i] = cluster.sums[half][i][0];
#pragma unroll
        for (int b = 1; b < BLOCKS; b++) values.of[i] += cluster.sums[half][i][b];
    }
    return values;
}

// Orders floats like unsigned integers; both zeros are the same. Never called with NaN.
__device__ __forceinline__ unsigned ordered(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The larger value wins, then the lower id. 0 is below every key, all ones (NaN) above.
__device__ __forceinline__ uint64 key_of(float value, unsigned id) {
    return uint64(ordered(value)) << 32 | ~id;
}
__device__ __forceinline__ unsigned id_of(uint64 key) { return ~unsigned(key); }
__device__ __forceinline__ float float_of(unsigned bits) {
    return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}
__device__ __forceinline__ float value_of(uint64 key) { return float_of(unsigned(key >> 32)); }

// Offset in the block's slice of this thread's n-th four values.
__device__ __forceinline__ int four_at(int n) { return (n * THREADS + int(threadIdx.x)) * 4; }

// The key of this thread's largest logit. Keeps the logits in `slice` if asked to, −∞ beyond the
// vocabulary. All loads are on their way before anything waits: whether to keep them is read from
// memory as well.
__device__ __forceinline__ uint64 load_logits(const float* logits, int vocabulary, float* slice,
                                              bool keep) {
    const int first = cluster_rank() * SLICE;
    float values[VALUES / 4][4];
#pragma unroll
    for (int n = 0; n < VALUES / 4; n++) {
        const int id = first + four_at(n);
#if VECTOR
        const float4 four =
            id < vocabulary ? *reinterpret_cast<const float4*>(logits + id)
                            : float4{-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F};
        values[n][0] = four.x, values[n][1] = four.y, values[n][2] = four.z, values[n][3] = four.w;
#else
#pragma unroll
        for (int j = 0; j < 4; j++)
            values[n][j] = id + j < vocabulary ? logits[id + j] : -CUDART_INF_F;
#endif
    }
    float best = -CUDART_INF_F;
    int best_id = first + four_at(0);
    bool nan = false;
#pragma unroll
    for (int n = 0; n < VALUES / 4; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            nan |= isnan(values[n][j]);
            if (values[n][j] > best) best = values[n][j], best_id = first + four_at(n) + j;
        }
    }
    if (keep) {
#pragma unroll
        for (int n = 0; n < VALUES / 4; n++)
            *reinterpret_cast<float4*>(slice + four_at(n)) = {values[n][0], values[n][1],
                                                              values[n][2], values[n][3]};
    }
    if (nan) return ~0ull;
    return best_id < vocabulary ? key_of(best, best_id) : 0;
}

// dsv4.ops.sampling._mix, and the state of gumbel_noise before the token id enters.
__device__ __forceinline__ unsigned mix(unsigned word) {
    word = (word ^ word >> 16) * 0x7FEB352Du;
    word = (word ^ word >> 15) * 0x846CA68Bu;
    return word ^ word >> 16;
}
__device__ __forceinline__ unsigned noise_state(int64 position, unsigned seed_low,
                                                unsigned seed_high) {
    const uint64 word = uint64(position) ^ mix(seed_low);
    // The first step of _mix works on all 64 bits of the position.
    unsigned low = unsigned(word ^ word >> 16) * 0x7FEB352Du;
    low = (low ^ low >> 15) * 0x846CA68Bu;
    return mix(low ^ low >> 16 ^ seed_high);
}
__device__ __forceinline__ unsigned noise_bits(unsigned state, unsigned id) {
    return mix(id ^ state) >> 8;
}

// 1 − u of the uniform number u = (bits + ½) / 2²⁴.
__device__ __forceinline__ float complement(unsigned bits) {
    return fmaf(float(0xffffffu - bits), 0x1p-24f, 0x1p-25f);
}

// −log(−log(u)) from single-precision hardware logarithms. The inner one is a series where u is
// close to 1; elsewhere its error of 2⁻²¹ is below 4e-5 of it. So the noise is off by less than
// 1e-4.
__device__ __forceinline__ float fast_noise(unsigned bits) {
    const float w = complement(bits);
    const float series = w * fmaf(w, fmaf(w, fmaf(w, 0.25f, 1.0f / 3), 0.5f), 1.0f);
    return -__logf(w < 0x1p-6f ? series : -__logf(fmaf(float(bits), 0x1p-24f, 0x1p-25f)));
}

struct Draw {
    float largest, temperature;
    unsigned state;
};

__device__ __forceinline__ float scaled(const Draw& draw, float logit) {
    return (logit - draw.largest) / draw.temperature;
}

// What top-p keeps, by distance = −(logit − largest) / temperature: all below `edge`, and below
// `next` the ids below `limit`.
struct Kept {
    float edge, next;
    unsigned limit;
};

struct Limit {
    unsigned id;
    int exchange;  // the number of the next exchange: by reference it would live in memory
};

// The lowest limit below which `wanted` ids have a value from `low` to below `high`; ~0 if no more
// have one, which the first count shows and which is usual.
__device__ __forceinline__ Limit limit_of(const float* slice, float low, float high, float wanted,
                                       Cluster& cluster, int exchange) {
    unsigned from = 0, to = BLOCKS * SLICE;
#pragma unroll 1
    for (unsigned limit = to; from < to; limit = (from + to) / 2) {
        float count = 0.0f;
#pragma unroll 1
        for (int n = 0; n < VALUES; n++) {
            const int at = n * THREADS + threadIdx.x;
            const unsigned id = cluster_rank() * SLICE + at;
            if (slice[at] >= low && slice[at] < high && id < limit) count += 1.0f;
        }
        count = sums_of_all(cluster, exchange++, {count}).of[0];
        if (limit == BLOCKS * SLICE && count <= wanted) return {~0u, exchange};
        if (count >= wanted) to = limit;
        else from = limit + 1;
    }
    return {to, exchange};
}

// Top-k: in `slice` only the k largest logits stay, of equal ones those with the lowest ids; the
// others become −∞, so that nothing behind has to know of it. The k-th largest is found two bits at
// a time, exactly: counts are integers below 2²⁴. Returns the number of the next exchange.
__device__ __noinline__ int keep_largest(float* slice, float k, Cluster& cluster, int exchange) {
    unsigned keys[VALUES];
#pragma unroll
    for (int n = 0; n < VALUES; n++) keys[n] = ordered(slice[n * THREADS + threadIdx.x]);
    unsigned edge = 0;
    float above = 0.0f;  // how many are larger than the edge will be
#pragma unroll 1
    for (int shift = 30; shift >= 0; shift -= 2) {
        unsigned bounds[3];
        Sums from = {};
#pragma unroll
        for (int c = 0; c < 3; c++) bounds[c] = edge + ((c + 1u) << shift);
#pragma unroll
        for (int n = 0; n < VALUES; n++) {
#pragma unroll
            for (int c = 0; c < 3; c++)
                if (keys[n] >= bounds[c]) from.of[c] += 1.0f;
        }
        from = sums_of_all(cluster, exchange++, from);
#pragma unroll
        for (int c = 2; c >= 0; c--)
            if (from.of[c] < k) above = from.of[c];
#pragma unroll
        for (int c = 0; c < 3; c++)
            if (from.of[c] >= k) edge = bounds[c];
    }
    const float last = float_of(edge), next = float_of(edge + 1);
    const Limit limit = limit_of(slice, last, next, k - above, cluster, exchange);
#pragma unroll 1
    for (int n = 0; n < VALUES; n++) {
        const int at = n * THREADS + threadIdx.x;
        const unsigned id = cluster_rank() * SLICE + at;
        if (slice[at] < last || (slice[at] < next && id >= limit.id)) slice[at] = -CUDART_INF_F;
    }
    __syncthreads();  // threads read what others have changed
    return limit.exchange;
}

// The edge is found two bits at a time, in units of 2⁻²⁰ up to 64: it is the largest of which the
// tokens closer than it do not yet reach top_p. Of the tokens at the edge the lowest ids stay, as
// many as are needed.
constexpr float UNIT = 0x1p-20f;

__device__ __forceinline__ Kept keep_top(const Draw& draw, float* slice, float* weights,
                                         float top_p, Cluster& cluster, int& exchange) {
    float whole = 0.0f;
#pragma unroll 1
    for (int n = 0; n < VALUES; n++) {
        const int at = n * THREADS + threadIdx.x;
        const float distance = -scaled(draw, slice[at]);
        slice[at] = distance;
        // weights = exp(-distance); distance = (logits.max() - logits) / temperature
        whole += weights[at] = expf(-distance);
    }
    whole = sums_of_all(cluster, exchange++, {whole}).of[0];
    const float target = top_p * whole;
    // The search reads everything 13 times: from registers, shared memory would be too slow.
    float distances[VALUES], own_weights[VALUES];
#pragma unroll
    for (int n = 0; n < VALUES; n++) {
        distances[n] = slice[n * THREADS + threadIdx.x];
        own_weights[n] = weights[n * THREADS + threadIdx.x];
    }
    unsigned edge = 0;
    float before = 0.0f;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 2) {
        float bounds[3];
        Sums below = {};
#pragma unroll
        for (int c = 0; c < 3; c++) bounds[c] = float(edge + ((c + 1u) << shift)) * UNIT;
#pragma unroll
        for (int n = 0; n < VALUES; n++) {
#pragma unroll
            for (int c = 0; c < 3; c++)
                if (distances[n] < bounds[c]) below.of[c] += own_weights[n];
        }
        below = sums_of_all(cluster, exchange++, below);
        const unsigned base = edge;
#pragma unroll
        for (int c = 0; c < 3; c++)
            if (below.of[c] < target) edge = base + ((c + 1u) << shift), before = below.of[c];
    }
    Kept kept{float(edge) * UNIT, float(edge + 1) * UNIT, ~0u};
    // i tokens of the edge come before one more as long as before + i · weight < target.
    const float wanted = fmaxf(ceilf((target - before) / expf(-kept.edge)), 1.0f);
    const Limit limit = limit_of(slice, kept.edge, kept.next, wanted, cluster, exchange);
    kept.limit = limit.id;
    exchange = limit.exchange;
    return kept;
}
