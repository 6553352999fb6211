// Tiles whose K is split among blocks: each block has a part of their sums, and adds up all parts
// of some of the tokens. All blocks of the launch run at once, with one tile each.
#pragma once
#include "prefill_results.cuh"

constexpr bool SPLITS = !BOXES && MODE != MODE_DOWN;
constexpr int EIGHTS = TOKENS / 8;
constexpr int CONSUMER_THREADS = CONSUMERS * WARP;
constexpr int PART = SIDES * EIGHTS * CONSUMER_THREADS;

template <int BLOCKS>
__device__ __forceinline__ void give_part(const Accumulators<BLOCKS>& acc, const Output& out,
                                          int index) {
    float4* to = out.parts + (int64)index * PART + threadIdx.x;
#pragma unroll
    for (int side = 0; side < SIDES; side++)
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
            const float(&c)[4] = acc[side][j];
            to[(side * EIGHTS + j) * CONSUMER_THREADS] = make_float4(c[0], c[1], c[2], c[3]);
        }
}

// Until the parts of all splits are there.
__device__ __forceinline__ void await_parts(const Gemm& g, const Output& out, int index) {
    __threadfence();
    consumers_sync();
    if (threadIdx.x == 0) {
        int* counter = out.counters + index / g.splits;
        atomicAdd(counter, 1);
        const Deadline deadline;
        while (*static_cast<volatile int*>(counter) < g.splits) deadline.check();
        // All have given their parts; the last one to see it leaves zero.
        if (atomicAdd(counter, 1) == 2 * g.splits - 1) *counter = 0;
    }
    consumers_sync();
    __threadfence();
}

// y_NT = part_NT.sum(splits), in their order, of eight tokens.
__device__ __forceinline__ void add_parts(Accumulators<1>& sum, const Gemm& g, const Tile& t,
                                          const Output& out, int index, int eight) {
    const float4* from =
        out.parts + (int64)(index - t.split) * PART + eight * CONSUMER_THREADS + threadIdx.x;
#pragma unroll 4
    for (int split = 0; split < g.splits; split++)
#pragma unroll
        for (int side = 0; side < SIDES; side++) {
            const float4 part =
                __ldcg(from + (int64)split * PART + side * EIGHTS * CONSUMER_THREADS);
            float(&c)[4] = sum[side][0];
            c[0] += part.x, c[1] += part.y, c[2] += part.z, c[3] += part.w;
        }
}

// What this block stores of a tile: every split has some of the tokens, eight at a time.
__device__ __forceinline__ void store_share(const Gemm& g, const Tile& t, const Output& out,
                                            int index) {
    float alpha[READ];
#pragma unroll
    for (int side = 0; side < READ; side++)
        alpha[side] = UNIT * global_scale(g, t, side);
    const int slot[TOKENS / WARP] = {};
    float routing[TOKENS / WARP];
#pragma unroll
    for (float& weight : routing) weight = 1.0f;
    await_parts(g, out, index);
    const int eights = (t.count + 7) / 8;
    for (int eight = t.split; eight < eights; eight += g.splits) {
        Accumulators<1> sum = {};
        add_parts(sum, g, t, out, index, eight);
        Tile tokens = t;
        tokens.first += 8 * eight, tokens.count -= 8 * eight;
        store_tile<1>(sum, alpha, g, tokens, out, slot, routing);
    }
}
