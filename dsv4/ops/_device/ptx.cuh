// Small PTX with names: shared memory, asynchronous copies, arithmetic, mbarriers.
#pragma once
#include "common.cuh"

// ---- shared memory ------------------------------------------------------------------------------

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return unsigned(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ uint4 load_shared16(unsigned address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address));
    return value;
}

__device__ __forceinline__ uint2 load_shared8(unsigned address) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
    return value;
}

__device__ __forceinline__ unsigned load_shared2(unsigned address) {
    unsigned short value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ unsigned load_shared4(unsigned address) {
    unsigned value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

// Four 8 x 8 matrices of 16 bits, a word of each: lane l gives the address of row l % 8 of matrix
// l / 8, and gets the columns 2 (l % 4) and one more of row l / 4 of all of them.
__device__ __forceinline__ uint4 load_matrices(unsigned row) {
    uint4 words;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(row));
    return words;
}

// ---- asynchronous copies ------------------------------------------------------------------------

// Copies 16 bytes, of which the first `bytes` come from `source` and the rest is zero.
__device__ __forceinline__ void cp_async16(unsigned target, const void* source, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target),
                 "l"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async16(unsigned target, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source)
                 : "memory");
}

// The same for bytes that nobody reads again before they would have left the L2 cache anyway, such
// as the weights of a decode step: first to leave it, so that activations, cache rows and
// instructions stay.
__device__ __forceinline__ unsigned long long read_once() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void cp_async16_once(unsigned target, const void* source, int bytes) {
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(target),
        "l"(source), "r"(bytes), "l"(read_once())
        : "memory");
}

__device__ __forceinline__ void cp_async16_once(unsigned target, const void* source) {
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(target),
        "l"(source), "l"(read_once())
        : "memory");
}

__device__ __forceinline__ void cp_async4(unsigned target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Copies BYTES (4, 8 or 16), or writes as many zeros and reads nothing. The rest of the line stays
// where it is: for rows that lie apart.
template <int BYTES>
__device__ __forceinline__ void copy_or_zero(unsigned target, const void* source, bool wanted) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                     "r"(wanted ? 16 : 0)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source),
                     "n"(BYTES), "r"(wanted ? BYTES : 0)
                     : "memory");
    }
}

__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Arrives at the barrier when all copies that this thread has begun are complete. Asynchronous
// products see what they wrote behind a proxy_fence of who has waited at the barrier.
__device__ __forceinline__ void cp_async_arrive(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- registers ----------------------------------------------------------------------------------

// A warpgroup takes registers that others of its block have given away, so that each of its threads
// has so many, or gives away what it has beyond them.
template <int REGISTERS>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- arithmetic ---------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- waits --------------------------------------------------------------------------------------

// A wait of about two seconds is a fault of the program: it ends as a CUDA error, not as a hang.
struct Deadline {
    long long end = clock64() + 4000000000ll;

    __device__ __forceinline__ void check() const {
        if (clock64() > end) __trap();
    }
};

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

// Behind barrier_init, by the same thread.
__device__ __forceinline__ void barrier_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// What this thread wrote to shared memory becomes visible to copies and products that are
// asynchronous.
__device__ __forceinline__ void proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Whether the phase of this parity has ended.
__device__ __forceinline__ bool barrier_test(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

// The same, but may sleep a little before it says no.
__device__ __forceinline__ bool barrier_try(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    if (barrier_try(barrier, parity)) return;
    const Deadline deadline;
    while (!barrier_try(barrier, parity)) deadline.check();
}

// Without a deadline, for threads that have no registers for its clock: the threads that they wait
// for have one.
__device__ __forceinline__ void barrier_wait_unlimited(unsigned barrier, unsigned parity) {
    while (!barrier_try(barrier, parity)) {
    }
}
