// Sums over the warps of a block, in shared memory: every warp stores its own, one warp adds them
// up.
//
// Defines: those of moe_decode.cu.
#pragma once
#include "moe_products.cuh"
#include "ptx.cuh"

// Lanes of a warp that arrive at the barriers of its sums. One is enough behind __syncwarp and up
// to 4 % faster than all; but racecheck does not see what the other lanes hand over with it, so it
// looks at a build with 32.
#ifndef ARRIVALS
#define ARRIVALS 1
#endif

// Items whose warp sums may be in shared memory at a time; the activations of eight tokens leave
// room for two.
constexpr int BUFFERS = TOKENS > 4 ? 2 : 4;
constexpr int PARTIAL = 2 * TOKENS * 16;

struct Partials {
    float* data;
    unsigned full, empty;

    __device__ __forceinline__ static int buffer(int item) { return item % BUFFERS; }
    __device__ __forceinline__ static unsigned parity(int item) { return item / BUFFERS & 1; }
    __device__ __forceinline__ static bool mine(int item, int warp) { return item % WARPS == warp; }

    // place: where the sum of this warp stands in the order of summation.
    __device__ __forceinline__ void put(int item, const Sums& sums, int place, int lane) const {
        if (item >= BUFFERS) barrier_wait(empty + 8 * buffer(item), parity(item) ^ 1);
        store(buffer(item) * WARPS + place, sums, 1.0f, 1.0f, lane);
        arrive(item, lane);
    }

    // The sums of a lane's first token times `low`, of its second one times `high`.
    __device__ __forceinline__ void store(int place, const Sums& sums, float low, float high,
                                          int lane) const {
        float* to = data + place * PARTIAL + (lane >> 2);
        const int token = lane % 4 / TOKEN_LANES * LANE_TOKENS;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int row = 0; row < 2; ++row)
#pragma unroll
                for (int t = 0; t < LANE_TOKENS; ++t) {
                    const float sum = sums.total(tile, row, t) * (t ? high : low);
                    if (lane % TOKEN_LANES == 0 && token + t < TOKENS)
                        to[(tile * TOKENS + token + t) * 16 + row * 8] = sum;
                }
    }

    // This warp has stored its sums of an item.
    __device__ __forceinline__ void arrive(int item, int lane) const {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(full + 8 * buffer(item));
    }

    __device__ __forceinline__ void begin_get(int item) const {
        barrier_wait(full + 8 * buffer(item), parity(item));
    }

    // Lane = row of the two tiles (0..31); sum over the warps for one token.
    __device__ __forceinline__ float get(int item, int token, int lane) const {
        const float* from = row(buffer(item) * WARPS, lane) + token * 16;
        float sum = 0.0f;
#pragma unroll
        for (int place = 0; place < WARPS; ++place) sum += from[place * PARTIAL];
        return sum;
    }

    // The first token's value of a lane's row at a place.
    __device__ __forceinline__ const float* row(int place, int lane) const {
        return data + place * PARTIAL + (lane >> 4) * TOKENS * 16 + (lane & 15);
    }

    __device__ __forceinline__ void end_get(int item, int lane) const {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(empty + 8 * buffer(item));
    }
};
