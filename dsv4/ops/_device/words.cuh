// A word {tag, value} of 64 bits that one device writes and another reads: by single relaxed
// accesses of the system's scope, so it is never torn. Addresses are those of global memory.
#pragma once
#include "common.cuh"

using word64 = unsigned long long;

constexpr long long WAIT_CYCLES = 10000000000ll;  // five seconds

__device__ __forceinline__ word64 make_word(unsigned tag, unsigned value) {
    return word64(tag) << 32 | value;
}

__device__ __forceinline__ unsigned tag_of(word64 word) { return unsigned(word >> 32); }

__device__ __forceinline__ void store_word(int64 address, word64 word) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

__device__ __forceinline__ word64 load_word(const void* address) {
    word64 word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}

// Tells the host, in pinned memory, which words did not come: {1, and three numbers that say it}.
// Ends the kernel. Inline: a call would put what the caller holds into local memory, also where all
// words are there.
__device__ __forceinline__ void give_up_waiting(int* fault, int set, int sender, int use) {
    fault[1] = set, fault[2] = sender, fault[3] = use;
    __threadfence_system();
    fault[0] = 1;
    __threadfence_system();
    __trap();
}
