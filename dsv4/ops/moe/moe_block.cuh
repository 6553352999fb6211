// What both phases of the experts' decode launch know of their block: the barriers of its warps,
// and where in shared memory things lie.
//
// Defines: those of moe_decode.cu.
#pragma once
#include "moe_down_line.cuh"
#include "moe_routes.cuh"
#include "moe_sums.cuh"
#include "ptx.cuh"

constexpr int BARRIERS = 2 * BUFFERS + 2 + BATCHES;

// Addresses of the barriers of a block.
struct Barriers {
    // Those of Partials; whether the experts of the step are known, and their weights; whether the
    // parts of a batch have been added up.
    unsigned full, empty, known, weighed, added;

    __device__ __forceinline__ explicit Barriers(const unsigned long long (&words)[BARRIERS]) {
        full = shared_address(words);
        empty = full + 8 * BUFFERS;
        known = empty + 8 * BUFFERS;
        weighed = known + 8;
        added = weighed + 8;
    }

    __device__ __forceinline__ void initialize(int T) const {
        if (threadIdx.x < BUFFERS) {
            barrier_init(full + 8 * threadIdx.x, WARPS * ARRIVALS);
            barrier_init(empty + 8 * threadIdx.x, ARRIVALS);
        }
        if (threadIdx.x < BATCHES) barrier_init(added + 8 * threadIdx.x, T * ARRIVALS);
        if (threadIdx.x == 0) barrier_init(known, WARP), barrier_init(weighed, T * WARP);
    }
};

// What a thread knows of its block.
struct Block {
    int warp, lane;
    // Tokens of the launch.
    int T;
    Barriers barriers;
    // The warp's ring of weights, and zeros that are read like activations.
    unsigned ring, no_activations;
    Partials partials;
    Routes& routes;
    RouteTable table;
};
