// Rows of the key caches: the device side of dsv4/caches/rows.py, which defines their bytes.
//
// KV_FP8 row of width D = N + R: N bytes e4m3, then R bf16; in a second buffer one E8M0 byte per 64
// of the N values, padded to a multiple of 8 bytes. BF16 and F32 rows are plain. INDEX_FP8: D bytes
// e4m3 and one float.
#pragma once
#include "common.cuh"

constexpr int KV_GROUP = 64;
constexpr float E4M3_LARGEST = 448.0f;

// The `format` arguments below are ROW_KV_FP8, ROW_BF16, ROW_F32 or ROW_INDEX_FP8 of
// dsv4/launch/constants.py.

// One cache. `scale` is null for plain rows. Pointers are those of slot 0.
struct RowStore {
    unsigned char* data;
    unsigned char* scale;
    int format, width, rope_width;

    __device__ __forceinline__ int quantised() const { return width - rope_width; }
    __device__ __forceinline__ int row_bytes() const {
        if (format == ROW_KV_FP8) return width + rope_width;
        return format == ROW_BF16 ? 2 * width : format == ROW_F32 ? 4 * width : width;
    }
    __device__ __forceinline__ int scale_bytes() const {
        return format == ROW_INDEX_FP8 ? 4 : ((quantised() + KV_GROUP - 1) / KV_GROUP + 7) / 8 * 8;
    }
    __device__ __forceinline__ unsigned char* row(int64 slot) const {
        return data + slot * row_bytes();
    }
    __device__ __forceinline__ unsigned char* row_scale(int64 slot) const {
        return scale + slot * scale_bytes();
    }
};

// ---- E8M0 and E4M3 ------------------------------------------------------------------------------

// 2^(code - 127); 255 is NaN. Code 0 is a subnormal, which the exponent field alone cannot express.
__device__ __forceinline__ float e8m0_to_float(int code) {
    const int bits = code == 0 ? 1 << 22 : code == 255 ? 0x7fffffff : code << 23;
    return __int_as_float(bits);
}

// 1 / 2^(code - 127), exact; code 1..254.
__device__ __forceinline__ float e8m0_reciprocal(int code) {
    return __int_as_float(code == 254 ? 1 << 22 : (254 - code) << 23);
}

// E8M0 code of 2^⌈log2(max(amax, 1e-4) / 448)⌉. `amax_bits` are the bits of a non-negative float
// (NaN counts as large).
__device__ __forceinline__ int kv_scale_code(unsigned amax_bits) {
    const float amax = __uint_as_float(max(amax_bits, __float_as_uint(1e-4f)));
    const int bits = __float_as_int(__fmul_rn(amax, (float)(1.0 / 448.0)));
    return min(((bits >> 23) & 0xff) + ((bits & 0x7fffff) != 0), 254);
}

// Rounds to nearest even, saturates at ±448, NaN stays NaN.
__device__ __forceinline__ unsigned char float_to_e4m3(float value) {
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

// Two floats to two codes, `low` in the low byte.
__device__ __forceinline__ unsigned short floats_to_e4m3x2(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float e4m3_to_float(unsigned char code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

// bf16x2 factor for e4m3x4_to_bf16x4: 2^(code - 127) · 2^120, twice. Exact for code 7..134 (block
// scales to 2^7).
__device__ __forceinline__ unsigned bf16x2_factor(int scale_code) {
    return ((scale_code + 120) << 7) * 0x10001u;
}

// Four codes times a block scale to bf16, in order: exact (three mantissa bits times a power of
// two). A NaN code becomes 480 · scale: use it only where NaN need not survive. The sign and the
// seven other bits of a code are the bits of a bf16 that is 2^120 too small.
__device__ __forceinline__ uint2 e4m3x4_to_bf16x4(unsigned codes, unsigned factor) {
    const unsigned low = __byte_perm(codes, 0, 0x1404);
    const unsigned high = __byte_perm(codes, 0, 0x3424);
    const unsigned a = (low & 0x80008000u) | ((low >> 4) & 0x07f007f0u);
    const unsigned b = (high & 0x80008000u) | ((high >> 4) & 0x07f007f0u);
    uint2 out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out.x) : "r"(a), "r"(factor));
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out.y) : "r"(b), "r"(factor));
    return out;
}

// ---- whole rows ---------------------------------------------------------------------------------

// Value d of a row, any format: for paths where speed does not matter.
__device__ __forceinline__ float row_value(const RowStore& rows, int64 slot, int d) {
    const unsigned char* row = rows.row(slot);
    if (rows.format == ROW_F32) return reinterpret_cast<const float*>(row)[d];
    if (rows.format == ROW_BF16) return __bfloat162float(reinterpret_cast<const bf16*>(row)[d]);
    if (rows.format == ROW_INDEX_FP8) {
        return e4m3_to_float(row[d]) * *reinterpret_cast<const float*>(rows.row_scale(slot));
    }
    const int quantised = rows.quantised();
    if (d >= quantised) {
        // Two bytes: with an odd N the rotary part is not aligned to bf16.
        const unsigned char* at = row + quantised + 2 * (d - quantised);
        return __uint_as_float((unsigned)at[0] << 16 | (unsigned)at[1] << 24);
    }
    return e4m3_to_float(row[d]) * e8m0_to_float(rows.row_scale(slot)[d / KV_GROUP]);
}

// 64 values of one KV_FP8 group by one warp: lane holds values 2·lane and 2·lane + 1 (0 beyond the
// group's end). Returns the two codes; `scale_code` is the same in every lane.
__device__ __forceinline__ unsigned short encode_kv_group(float first, float second,
                                                          int& scale_code) {
    // Bits of non-negative floats compare like unsigned integers, and NaN is the largest, as in
    // torch's amax.
    const unsigned amax = max(__float_as_uint(fabsf(first)), __float_as_uint(fabsf(second)));
    scale_code = kv_scale_code(__reduce_max_sync(~0u, amax));
    const float factor = e8m0_reciprocal(scale_code);
    return floats_to_e4m3x2(first * factor, second * factor);
}

// Stores a row: pack_kv_rows, pack_index_rows or a plain copy. `row` [width] bf16 lies in shared
// memory, where every thread sees it; called by all threads of the block (blockDim.x a multiple of
// 32, at least 32); ends without a barrier.
__device__ inline void store_row(const bf16* row, const RowStore& rows, int64 slot) {
    unsigned char* out = rows.row(slot);
    if (rows.format == ROW_BF16) {
        for (int d = threadIdx.x; d < rows.width; d += blockDim.x)
            reinterpret_cast<bf16*>(out)[d] = row[d];
        return;
    }
    if (rows.format == ROW_F32) {
        for (int d = threadIdx.x; d < rows.width; d += blockDim.x) {
            reinterpret_cast<float*>(out)[d] = __bfloat162float(row[d]);
        }
        return;
    }
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const int warps = blockDim.x / WARP;
    if (rows.format == ROW_INDEX_FP8) {
        // Every warp finds the scale, so that no barrier is needed.
        unsigned amax_bits = 0;
        for (int d = lane; d < rows.width; d += WARP) {
            amax_bits = max(amax_bits, __float_as_uint(fabsf(__bfloat162float(row[d]))));
        }
        const float amax = __uint_as_float(__reduce_max_sync(~0u, amax_bits));
        const float scale = amax > 0.0f ? __fdiv_rn(amax, E4M3_LARGEST) : 1.0f;
        for (int d = threadIdx.x; d < rows.width; d += blockDim.x) {
            out[d] = float_to_e4m3(__fdiv_rn(__bfloat162float(row[d]), scale));
        }
        if (threadIdx.x == 0) *reinterpret_cast<float*>(rows.row_scale(slot)) = scale;
        return;
    }
    const int quantised = rows.quantised();
    const int groups = (quantised + KV_GROUP - 1) / KV_GROUP;
    unsigned char* scale = rows.row_scale(slot);
    for (int group = warp; group < groups; group += warps) {
        const int d = group * KV_GROUP + 2 * lane;
        const float first = d < quantised ? __bfloat162float(row[d]) : 0.0f;
        const float second = d + 1 < quantised ? __bfloat162float(row[d + 1]) : 0.0f;
        int code;
        const unsigned short codes = encode_kv_group(first, second, code);
        if (d < quantised) out[d] = codes & 0xff;
        if (d + 1 < quantised) out[d + 1] = codes >> 8;
        if (lane == 0) scale[group] = code;
    }
    for (int group = groups + threadIdx.x; group < rows.scale_bytes(); group += blockDim.x)
        scale[group] = 0;
    const unsigned char* rotary = reinterpret_cast<const unsigned char*>(row + quantised);
    for (int i = threadIdx.x; i < 2 * rows.rope_width; i += blockDim.x)
        out[quantised + i] = rotary[i];
}
