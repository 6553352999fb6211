// The routed (token, slot) pairs in expert order, and the token tiles of the grouped products. One
// block; stable, so the order within an expert is that of the tokens. torch: slots =
// ids.flatten().argsort(stable=True).
#include "common.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / WARP;

// Lanes that hold the same expert. (match.any takes one pass per distinct value.)
__device__ __forceinline__ unsigned same_expert(int expert, int bits) {
    unsigned same = ~0u;
    for (int bit = 0; bit < bits; bit++) {
        const bool set = expert >> bit & 1;
        const unsigned lanes = __ballot_sync(~0u, set);
        same &= set ? lanes : ~lanes;
    }
    return same;
}

// ids [count], an id outside [0, experts) is left out. slots [count], tiles {expert, first, pairs,
// 0} of at most `tile` pairs, tile_count [1]. Shared: (WARPS + 2) * (experts + 1) ints, then twice
// count 16-bit values.
extern "C" __global__ void __launch_bounds__(THREADS)
    moe_sort(const int64* ids, int* slots, int4* tiles, int* tile_count, int count, int experts,
             int tile) {
    extern __shared__ int shared[];
    const int classes = experts + 1;        // the last one: no expert
    int* before = shared;                   // [warp][class]: pairs of earlier warps
    int* total = before + WARPS * classes;  // [class]
    int* first = total + classes;           // [class]: position of its first pair
    unsigned short* expert_of = reinterpret_cast<unsigned short*>(first + classes);
    unsigned short* rank = expert_of + count;  // among the pairs of one expert and warp
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const int bits = 32 - __clz(experts);
    assert_shared_memory(4 * ((WARPS + 2) * classes + count));
    for (int i = threadIdx.x; i < WARPS * classes; i += THREADS) before[i] = 0;
    pdl_wait();
    pdl_launch();
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int64 id = ids[i];
        expert_of[i] = id >= 0 && id < experts ? (int)id : experts;
    }
    __syncthreads();

    // Each warp walks its own stretch of the pairs in order.
    const int stretch = (count + THREADS - 1) / THREADS * WARP;
    const int begin = min(warp * stretch, count);
    const int end = min(begin + stretch, count);
    int* mine = before + warp * classes;
    for (int base = begin; base < end; base += WARP) {
        const int i = base + lane, expert = i < end ? expert_of[i] : experts;
        const unsigned same = same_expert(expert, bits);
        if (i < end) rank[i] = mine[expert] + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (__ffs(same) - 1 == lane) mine[expert] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        int sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const int here = before[w * classes + e];
            before[w * classes + e] = sum;
            sum += here;
        }
        total[e] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        int pairs_so_far = 0, tiles_so_far = 0;
        for (int base = 0; base < experts; base += WARP) {
            const int e = base + lane;
            const int pairs = e < experts ? total[e] : 0;
            const int parts = (pairs + tile - 1) / tile;
            int pairs_up_to = pairs, tiles_up_to = parts;
            for (int offset = 1; offset < WARP; offset *= 2) {
                const int p = __shfl_up_sync(~0u, pairs_up_to, offset);
                const int t = __shfl_up_sync(~0u, tiles_up_to, offset);
                if (lane >= offset) pairs_up_to += p, tiles_up_to += t;
            }
            const int start = pairs_so_far + pairs_up_to - pairs;
            if (e < experts) first[e] = start;
            for (int part = 0; part < parts; part++)
                tiles[tiles_so_far + tiles_up_to - parts + part] =
                    make_int4(e, start + part * tile, min(tile, pairs - part * tile), 0);
            pairs_so_far += __shfl_sync(~0u, pairs_up_to, WARP - 1);
            tiles_so_far += __shfl_sync(~0u, tiles_up_to, WARP - 1);
        }
        if (lane == 0) *tile_count = tiles_so_far;
    }
    __syncthreads();
    for (int i = begin + lane; i < end; i += WARP) {
        const int expert = expert_of[i];
        if (expert < experts) slots[first[expert] + mine[expert] + rank[i]] = i;
    }
}
