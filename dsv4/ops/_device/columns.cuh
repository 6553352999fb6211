// A thread's neighbouring columns of a bf16 or float32 row, in one memory access where the count
// allows.
#pragma once
#include "common.cuh"

template <int Count>
struct Columns;  // Count packed bf16

template <>
struct Columns<8> {
    uint4 words;
};
template <>
struct Columns<4> {
    uint2 words;
};
template <>
struct Columns<2> {
    unsigned words;
};
template <>
struct Columns<1> {
    unsigned short words;
};

template <int Count>
__device__ __forceinline__ Columns<Count> load_columns(const bf16* address) {
    return *reinterpret_cast<const Columns<Count>*>(address);
}

// The same where the program says. So what a thread needs is asked for at once: the compiler asks
// for some of it only behind what it computes from the rest, to save registers.
template <int Count>
__device__ __forceinline__ Columns<Count> request_columns(const bf16* address) {
    Columns<Count> columns;
    if constexpr (Count == 1)
        asm volatile("ld.global.u16 %0, [%1];" : "=h"(columns.words) : "l"(address));
    else if constexpr (Count == 2)
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(columns.words) : "l"(address));
    else
        static_assert(Count <= 2, "no larger one is needed");
    return columns;
}

// Values that a kernel has written, likewise. VECTORS: they are whole vectors of 16 bytes, aligned.
template <bool VECTORS, int N>
__device__ __forceinline__ void request_values(const float* address, float (&values)[N]) {
    if constexpr (VECTORS) {
        static_assert(N % 4 == 0);
#pragma unroll
        for (int i = 0; i < N; i += 4)
            asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(values[i]), "=f"(values[i + 1]), "=f"(values[i + 2]),
                           "=f"(values[i + 3])
                         : "l"(address + i));
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            asm volatile("ld.global.f32 %0, [%1];" : "=f"(values[i]) : "l"(address + i));
    }
}

template <int Count>
__device__ __forceinline__ void store_columns(bf16* address, const Columns<Count>& columns) {
    *reinterpret_cast<Columns<Count>*>(address) = columns;
}

template <int Count>
__device__ __forceinline__ float column(const Columns<Count>& columns, int index) {
    if constexpr (Count == 1) {
        return __uint_as_float(unsigned(columns.words) << 16);
    } else {
        const unsigned word = reinterpret_cast<const unsigned*>(&columns.words)[index / 2];
        return __uint_as_float(index % 2 ? word & 0xffff0000u : word << 16);
    }
}

// Rounds to nearest even, as torch's cast does.
template <int Count>
__device__ __forceinline__ Columns<Count> round_columns(const float (&values)[Count]) {
    Columns<Count> columns;
    if constexpr (Count == 1) {
        columns.words = __bfloat16_as_ushort(__float2bfloat16(values[0]));
    } else {
#pragma unroll
        for (int i = 0; i < Count; i += 2) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(values[i], values[i + 1]);
            reinterpret_cast<unsigned*>(&columns.words)[i / 2] =
                *reinterpret_cast<const unsigned*>(&pair);
        }
    }
    return columns;
}

// Constants only.
template <int Count>
__device__ __forceinline__ void load_constants(const float* address, float (&values)[Count]) {
    if constexpr (Count == 1) {
        values[0] = __ldg(address);
    } else {
#pragma unroll
        for (int i = 0; i < Count; i += 4) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(address + i));
            values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z,
            values[i + 3] = four.w;
        }
    }
}

// The same where the program says, so that pdl_wait() stays behind it: the compiler moves other
// loads of constants.
__device__ __forceinline__ float fetch_constant(const float* address) {
    float value;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(address));
    return value;
}

template <int Count>
__device__ __forceinline__ void fetch_constants(const float* address, float (&values)[Count]) {
    if constexpr (Count == 1) {
        values[0] = fetch_constant(address);
    } else {
#pragma unroll
        for (int i = 0; i < Count; i += 4) {
            const uint4 four = load_stream(address + i);
            values[i] = __uint_as_float(four.x), values[i + 1] = __uint_as_float(four.y);
            values[i + 2] = __uint_as_float(four.z), values[i + 3] = __uint_as_float(four.w);
        }
    }
}
