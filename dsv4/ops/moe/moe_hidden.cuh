// Hidden rows on their way from the blocks that compute them to the warps that multiply them
// (hand_over.cuh).
//
// Defines: those of moe_decode.cu.
#pragma once
#include "hand_over.cuh"
#include "moe_shape.cuh"
#include "ptx.cuh"

// What a warp multiplies a stage of w2 with, in units of 16 bytes. Lane l has the units l, l + 32,
// ... and HELD of them at a time in registers, as they were requested. That is all but for a 4-bit
// shared expert of many tokens and for experts that many tokens share.
struct HiddenSlice {
    static constexpr int BYTES = TOKENS * STAGE_COLUMNS * 2, MOST_UNITS = BYTES / 16;
    static constexpr int LANE_UNITS = (MOST_UNITS + WARP - 1) / WARP;
    static constexpr int ROOM = TOKENS > 4 ? 4 : 2;
    static constexpr int HELD = LANE_UNITS < ROOM ? LANE_UNITS : ROOM;

    const char* from;
    int units;
    uint4 words[HELD];

    // Units that do not exist are zeros.
    __device__ __forceinline__ void request(int first, int lane) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int unit = first + i * WARP + lane;
            words[i] = request_words(from + unit * 16, unit < units);
        }
    }

    // Whether all that was requested had been published.
    __device__ __forceinline__ bool complete() const {
        unsigned least = ~0u;
#pragma unroll
        for (int i = 0; i < HELD; ++i) least = min(least, least_word(words[i]));
        return __all_sync(~0u, least != 0);
    }

    // Behind request(0): waits for the slice and writes it to shared memory.
    __device__ __forceinline__ void take(unsigned to, int lane) {
        const int room = TAILS ? MOST_UNITS : units;
#pragma unroll 1
        for (int first = 0;; request(first, lane)) {
            if (!complete()) {
                const Deadline deadline;
                do {
                    deadline.check();
                    request(first, lane);
                } while (!complete());
            }
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const int unit = first + i * WARP + lane;
                if (unit < room)
                    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + unit * 16),
                                 "r"(~words[i].x), "r"(~words[i].y), "r"(~words[i].z),
                                 "r"(~words[i].w)
                                 : "memory");
            }
            first += HELD * WARP;
            if (HELD == LANE_UNITS || first >= room) return;
        }
    }
};
