// Hidden rows on their way from the blocks that compute them to those that multiply them, inside
// one launch. A word says itself that it has arrived, so a warp waits for the words that it
// multiplies next and for nothing else: there is no barrier, no fence and no flag, each of which
// would be a trip through L2 behind the weights that the block has requested.
//
// A word is published as the complement of two 16-bit values; 0 is one that has not come. The
// values are never both 0xFFFF: they come from cvt.rn, whose only NaN is 0x7FFF in f16 and in bf16.
// Value and proof are one 32-bit word, so that relaxed stores and loads are enough.
//
// h has two halves, which launches take in turn. A launch clears the half of the one before it:
// that one has ended, and the next one finds zeros.
//
// Defines and STAGE_COLUMNS: those of moe_decode.cu.
#pragma once
#include "launch_number.cuh"
#include "ptx.cuh"

// ---- words --------------------------------------------------------------------------------------

// Two neighbouring words, 8-byte aligned.
__device__ __forceinline__ void publish(char* to, unsigned first, unsigned second) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(~first), "r"(~second)
                 : "memory");
}

// The block's share of clearing a half, 512 bytes at a time: one of each block, first by the last
// warps, since the first ones choose the experts.
__device__ __forceinline__ void clear_hidden(char* half, int bytes) {
    const int warp = WARPS - 1 - warp_index(), lane = threadIdx.x % WARP;
    for (int at = ((warp * BLOCKS + blockIdx.x) * WARP + lane) * 16; at < bytes;
         at += WARPS * BLOCKS * WARP * 16)
        __stcg(reinterpret_cast<uint4*>(half + at), make_uint4(0, 0, 0, 0));
}

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
            words[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
            asm volatile(
                "{\n"
                ".reg .pred p;\n"
                "setp.lt.s32 p, %5, %6;\n"
                "@p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                : "+r"(words[i].x), "+r"(words[i].y), "+r"(words[i].z), "+r"(words[i].w)
                : "l"(from + unit * 16), "r"(unit), "r"(units)
                : "memory");
        }
    }

    // Whether all that was requested had been published.
    __device__ __forceinline__ bool complete() const {
        unsigned least = ~0u;
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            least = min(least, min(min(words[i].x, words[i].y), min(words[i].z, words[i].w)));
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
