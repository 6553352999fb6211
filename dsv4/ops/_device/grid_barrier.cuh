// One meeting of all blocks of a launch.
#pragma once
#include "ptx.cuh"

// Every block arrives and waits for all others. All blocks must be resident: one per
// multiprocessor, and nothing else that waits for this grid. What threads wrote before is visible
// behind it. Launches take counters[0] and counters[1] in turn, by the parity of counters[2], their
// number; one of them clears the other's, which nobody reads any more.
struct GridBarrier {
    int* counters;
    int launch;

    // The fence waits for what the warp of thread 0 has in flight: a warp 0 with copies to start
    // does that behind it.
    __device__ __forceinline__ void arrive() const {
        __syncthreads();
        if (threadIdx.x == 0)
            asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(
                             counters + (launch & 1))
                         : "memory");
    }

    __device__ __forceinline__ void pass() const {
        if (threadIdx.x == 0) {
            const Deadline deadline;
            for (int arrived = 0; arrived < int(gridDim.x); deadline.check())
                asm volatile("ld.acquire.gpu.s32 %0, [%1];"
                             : "=r"(arrived)
                             : "l"(counters + (launch & 1))
                             : "memory");
            if (blockIdx.x == 0) {
                counters[1 - (launch & 1)] = 0;
                counters[2] = launch + 1;
            }
        }
        __syncthreads();
    }

    __device__ __forceinline__ void wait() const {
        arrive();
        pass();
    }
};
