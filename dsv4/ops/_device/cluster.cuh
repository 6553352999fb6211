// Blocks of one cluster send each other words of shared memory. A message counts its own bytes on a
// barrier of the receiver, so that nobody needs a fence: a cluster barrier with release semantics
// costs a whole-GPU one.
#pragma once
#include "ptx.cuh"

using uint64 = unsigned long long;

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ unsigned remote_address(const void* shared, unsigned rank) {
    unsigned address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"(shared_address(shared)), "r"(rank));
    return address;
}

// Every thread of the cluster calls start, then, before the first message is sent, started. One
// thread of every block sets up `count` inboxes in start.
__device__ __forceinline__ void cluster_start(uint64* inboxes, int count) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < count; i++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(inboxes + i))
                         : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_started() {
    asm volatile("barrier.cluster.wait;" ::: "memory");
}

// One thread of the receiving block, once per use of the inbox: how many bytes complete it.
__device__ __forceinline__ void expect_mail(uint64* inbox, int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(inbox)),
        "r"(bytes)
        : "memory");
}

// Stores to the variable of block `rank` that `slot` names in this block, and counts it on that
// block's inbox.
__device__ __forceinline__ void send(float* slot, uint64* inbox, unsigned rank, float value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     remote_address(slot, rank)),
                 "r"(__float_as_uint(value)), "r"(remote_address(inbox, rank))
                 : "memory");
}
__device__ __forceinline__ void send(uint64* slot, uint64* inbox, unsigned rank, uint64 value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
                     remote_address(slot, rank)),
                 "l"(value), "r"(remote_address(inbox, rank))
                 : "memory");
}

__device__ __forceinline__ void send(float2* slot, uint64* inbox, unsigned rank, float2 value) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
            remote_address(slot, rank)),
        "f"(value.x), "f"(value.y), "r"(remote_address(inbox, rank))
        : "memory");
}
__device__ __forceinline__ void send(uint4* slot, uint64* inbox, unsigned rank, uint4 value) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(remote_address(slot, rank)),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(remote_address(inbox, rank))
        : "memory");
}

// Waits until all bytes of the inbox's use number `use` have come. The blocks of a cluster run
// together, so they come soon; if they never do, that is a fault of the program.
__device__ __forceinline__ void wait_mail(uint64* inbox, int use) {
    unsigned done = 0;
    for (int tries = 0; !done; tries++) {
        if (tries == 1 << 20) __trap();
        asm volatile(
            "{\n"
            ".reg .pred complete;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
            "selp.u32 %0, 1, 0, complete;\n}"
            : "=r"(done)
            : "r"(shared_address(inbox)), "r"(use & 1)
            : "memory");
    }
}

// A full cluster barrier in two halves, for exchanges where a fence (about a microsecond) does not
// matter.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
