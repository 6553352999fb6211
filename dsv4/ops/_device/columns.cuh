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
struct Columns<1> {
    unsigned short words;
};

template <int Count>
__device__ __forceinline__ Columns<Count> load_columns(const bf16* address) {
    return *reinterpret_cast<const Columns<Count>*>(address);
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
