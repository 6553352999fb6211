// Shared by every kernel: programmatic dependent launch, memory access with cache hints, warp and
// block reductions.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

using bf16 = __nv_bfloat16;
using int64 = long long;

constexpr int WARP = 32;

// The warp's number in its block. The shuffle tells the compiler that all lanes have the same one:
// what goes with it is then computed once for the warp, and its branches part no lanes.
__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, threadIdx.x / WARP, 0); }

// The same number, for the targets of a lane's copies: ptxas 13.0 gives cp.async with a cache hint
// an encoding that does not exist where the target is a uniform register and a lane's one.
__device__ __forceinline__ int own_warp() { return threadIdx.x / WARP; }

// Waits until every kernel before this one has finished and its writes are visible. Before it a
// kernel may only read constants (weights, scales, tables) and what was complete when it started
// (dsv4/launch/settled.py); every thread that reads or writes anything else calls it.
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Numbers that were complete when the kernel started: the recording refuses others as arguments of
// these types.
struct settled_int64 {
    int64 value;
};
struct settled_float {
    float value;
};
// The compiler leaves the load where it stands, in front of pdl_wait().
__device__ __forceinline__ int64 fetch_settled(const settled_int64* address) {
    int64 value;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}
__device__ __forceinline__ float fetch_settled(const settled_float* address) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
    return value;
}

// Lets the next kernel start its prologue. It still waits, in its own pdl_wait(), for all of this
// kernel. A kernel that calls this behind its wait settles what came before it
// (dsv4/launch/settled.py).
__device__ __forceinline__ void pdl_launch() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Stops the kernel if it was launched with less dynamic shared memory than it is about to use.
__device__ __forceinline__ void assert_shared_memory(unsigned needed_bytes) {
    unsigned found;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(found));
    if (found < needed_bytes) __trap();
}

// 16 bytes of constants that no other block will read: not kept in L1.
__device__ __forceinline__ uint4 load_stream(const void* address) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

// The same of what kernels in front have written: pdl_wait() does not order read-only loads (.nc).
__device__ __forceinline__ uint4 load_written(const void* address) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Four E4M3 codes to f16, in order, exact. The instruction takes two of them from either half of a
// register; behind a shift or a cast it would get a copy of the upper half.
__device__ __forceinline__ uint2 e4m3x4_to_f16x4(unsigned codes) {
    uint2 halves;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(codes));
    return halves;
}

__device__ __forceinline__ float2 f16x2_to_floats(unsigned halves) {
    return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

constexpr __host__ __device__ int power_of_two(int least) {
    return least > 1 ? 2 * power_of_two((least + 1) / 2) : 1;
}

// warp_sum of N values at once, with fewer shuffles and the same bits: lane l gets that of value
// l / (WARP / N). Every step halves what a lane has left of them.
template <int N, int OFFSET = WARP / 2>
__device__ __forceinline__ float warp_sums(const float (&values)[N]) {
    static_assert(N <= 2 * OFFSET, "a value for every lane at most");
    constexpr int KEPT = N > 1 ? N / 2 : 1;
    float sums[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        float own = values[i], other = values[i];
        if constexpr (N > 1) {
            const bool upper = threadIdx.x & OFFSET;
            own = upper ? values[i + KEPT] : values[i];
            other = upper ? values[i] : values[i + KEPT];
        }
        sums[i] = own + __shfl_xor_sync(~0u, other, OFFSET);
    }
    if constexpr (OFFSET > 1) return warp_sums<KEPT, OFFSET / 2>(sums);
    else return sums[0];
}

// As warp_max, of values that are not negative: their bits compare like them.
__device__ __forceinline__ float warp_max_magnitude(float value) {
    return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(value)));
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}

// Sum over a block of at most 1024 threads, in a fixed order, for every thread. `scratch` holds 33
// floats.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    const int warps = (blockDim.x + WARP - 1) / WARP, lane = threadIdx.x % WARP;
    if (lane == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    if (threadIdx.x < WARP) {
        value = warp_sum(lane < warps ? scratch[lane] : 0.0f);
        if (lane == 0) scratch[WARP] = value;
    }
    __syncthreads();
    return scratch[WARP];
}

// Tells the host, which reads `nan` in pinned memory (or nullptr), that one of the values which a
// kernel compares is NaN: a comparison hides it.
__device__ __forceinline__ void note_nan(int* nan, float value) {
    if (value != value && nan != nullptr)
        asm volatile("st.relaxed.sys.global.s32 [%0], 1;" ::"l"(nan) : "memory");
}

// True in the block that arrives last of `expected`, which then sees what the others wrote before;
// resets the counter. Every thread of every block calls it. `flag` is one int of shared memory.
__device__ __forceinline__ bool last_arriver(int* counter, int expected, int* flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const bool last = atomicAdd(counter, 1) == expected - 1;
        if (last) *counter = 0;
        *flag = last;
    }
    __syncthreads();
    if (*flag) __threadfence();
    return *flag;
}
