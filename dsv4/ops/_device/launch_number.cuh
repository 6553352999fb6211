// The number of a launch among those that share a counter: marks, or chooses the place of, what its
// blocks send each other.
#pragma once
#include "common.cuh"

// How many of the launches that share `counter` have ended: the high half of it. All blocks of a
// launch together add 2^32, each its part, and a block reads before it adds. So whatever blocks of
// this launch have added, the reader's part is missing: less than 2^32, which carries nothing.
struct LaunchNumber {
    unsigned long long* counter;  // 0 before the first launch

    // After pdl_wait.
    __device__ __forceinline__ unsigned read() const {
        unsigned long long value;
        // Volatile: requested here, not where it is needed.
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter));
        return unsigned(value >> 32);
    }

    // One thread of every block, once, after a barrier of the block that follows read().
    __device__ __forceinline__ void end() const {
        const unsigned long long part = blockIdx.x == 0 ? (1ull << 32) - (gridDim.x - 1) : 1;
        asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(counter), "l"(part)
                     : "memory");
    }
};
