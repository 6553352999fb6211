// What the prefill attention kernels for Hopper share besides attention_prefill.cuh: operands of a
// warpgroup's products, and barriers of some of a block's warps.
#pragma once
#include "attention_prefill.cuh"
#include "wgmma.cuh"

static_assert(DIM == 512, "the accumulators are dealt for it");
constexpr int GROUP_THREADS = 128;

// Keeps the compiler from moving accesses of accumulators across the asynchronous products.
template <int count>
__device__ __forceinline__ void pin(float (&values)[count]) {
#pragma unroll
    for (int i = 0; i < count; i++) asm volatile("" : "+f"(values[i])::"memory");
}

// Barrier of `threads` threads, which have no other of this number.
template <int threads>
__device__ __forceinline__ void meet(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(threads) : "memory");
}

// The same; true if `value` is true in any of them.
template <int threads>
__device__ __forceinline__ bool any_of(int number, bool value) {
    unsigned result;
    asm volatile(
        "{\n"
        ".reg .pred in, out;\n"
        "setp.ne.u32 in, %1, 0;\n"
        "bar.red.or.pred out, %2, %3, in;\n"
        "selp.u32 %0, 1, 0, out;\n}"
        : "=r"(result)
        : "r"((unsigned)value), "r"(number), "n"(threads)
        : "memory");
    return result != 0;
}

// `bytes` from `source` on, both multiples of 16, to the L2 cache.
__device__ __forceinline__ void prefetch_bulk(const void* source, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// The operands of sums d[..].
#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
