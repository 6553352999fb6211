// 16-bit values on their way between blocks, inside one launch. A word says itself that it has
// arrived, so a warp waits for the words that it needs next and for nothing else: there is no
// barrier, no fence and no flag, each of which would be a trip through L2 behind the weights that
// the block has requested.
//
// A word is published as the complement of two values; 0 is one that has not come. The values are
// never both 0xFFFF: they come from cvt.rn, whose only NaN is 0x7FFF in f16 and in bf16. Value and
// proof are one 32-bit word, so that relaxed stores and loads are enough.
//
// Defines: WARPS, of a block.
#pragma once
#include "launch_number.cuh"
#include "ptx.cuh"

__device__ __forceinline__ void publish(char* to, unsigned word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(~word) : "memory");
}

// Two neighbouring words, 8-byte aligned.
__device__ __forceinline__ void publish(char* to, unsigned first, unsigned second) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(~first), "r"(~second)
                 : "memory");
}

// Four words as they are now, if they exist; else four that have come.
__device__ __forceinline__ uint4 request_words(const char* from, bool exist) {
    uint4 words = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (exist)
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                     : "l"(from)
                     : "memory");
    return words;
}

// 0 where one of them has not come.
__device__ __forceinline__ unsigned least_word(const uint4& words) {
    return min(min(words.x, words.y), min(words.z, words.w));
}

// What has been published; zeros of words that do not exist.
__device__ __forceinline__ uint4 published(const uint4& words) {
    return make_uint4(~words.x, ~words.y, ~words.z, ~words.w);
}

// Words have two halves, which launches take in turn. A launch clears the half of the one before
// it: that one has ended, and the next one finds zeros.
struct WordHalves {
    char* halves;
    int half_bytes;

    __device__ __forceinline__ char* of(unsigned launch) const {
        return launch & 1 ? halves + half_bytes : halves;
    }

    // The block's share of clearing, 512 bytes at a time: one of each block, first by the last
    // warps, since the first ones have more to do.
    __device__ __forceinline__ void clear_before(unsigned launch, int blocks) const {
        char* half = of(launch + 1);
        const int warp = WARPS - 1 - warp_index(), lane = threadIdx.x % WARP;
        for (int at = ((warp * blocks + blockIdx.x) * WARP + lane) * 16; at < half_bytes;
             at += WARPS * blocks * WARP * 16)
            __stcg(reinterpret_cast<uint4*>(half + at), make_uint4(0, 0, 0, 0));
    }
};
