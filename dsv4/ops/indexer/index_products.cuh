// What the score kernels agree on, so that they have the same bits: queries as they are multiplied,
// the sum over the heads, and how a score is written. With FP8 1 queries and keys are e4m3, whose
// values float16 holds exactly, and their scales multiply the float32 sums; with FP8 0 they are
// bfloat16.
#pragma once
#include "index_order.cuh"

#ifndef HEADS
#define HEADS 64
#endif
#ifndef FP8
#define FP8 1
#endif

constexpr int DIM = 128;
// A lane takes 16-byte chunks of a key, CHUNK_VALUES values each, LANE_CHUNKS of them, and the same
// values of a query: the order of the products along a row is free as long as keys and queries
// agree.
constexpr int CHUNK_VALUES = FP8 ? 16 : 8, LANE_CHUNKS = DIM / CHUNK_VALUES / 4;

__device__ __forceinline__ unsigned half_pair(unsigned e4m3_pair) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)e4m3_pair, __NV_E4M3);
    return (unsigned)pair.x | (unsigned)pair.y << 16;
}

// Divides bfloat16 values by `scale`, a peak of such values / 448. The remainder of the product
// with the reciprocal corrects it: the quotient is the correctly rounded one for all 128 · 128
// mantissas. `shift` keeps remainders and reciprocals in the range of normal numbers.
struct Divisor {
    float shift, scale, reciprocal;

    __device__ __forceinline__ explicit Divisor(float divisor)
        : shift(divisor < 0x1p-60f ? 0x1p64f : divisor > 0x1p60f ? 0x1p-64f : 1.0f),
          scale(divisor * shift), reciprocal(__frcp_rn(scale)) {}

    __device__ __forceinline__ float divide(float value) const {
        value *= shift;
        const float quotient = value * reciprocal;
        return fmaf(fmaf(-quotient, scale, value), reciprocal, quotient);
    }
};

// Two values of a query, divided by the head's scale, in float16.
__device__ __forceinline__ unsigned query_pair(unsigned pair, const Divisor& scale) {
    const float2 values = make_float2(scale.divide(__uint_as_float(pair << 16)),
                                      scale.divide(__uint_as_float(pair & 0xFFFF0000u)));
    return half_pair(__nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, __NV_E4M3));
}

// What lane `part` of four multiplies of a head's query, in the order of its chunks.
struct QueryPart {
    uint4 pairs[4];

    __device__ __forceinline__ void load(const bf16* query, int part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int chunk = i / (4 / LANE_CHUNKS), eighth = i % (4 / LANE_CHUNKS);
            pairs[i] = *reinterpret_cast<const uint4*>(query + CHUNK_VALUES * (4 * chunk + part) +
                                                       8 * eighth);
        }
    }

    // torch: query = unpack_index_rows(*pack_index_rows(query)), without the scale, which is
    // returned.
    __device__ __forceinline__ float round() {
        float scale = 1.0f;
#if FP8
        float peak = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned words[4] = {pairs[i].x, pairs[i].y, pairs[i].z, pairs[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                peak = nan_max(peak, fabsf(__uint_as_float(words[j] << 16)));
                peak = nan_max(peak, fabsf(__uint_as_float(words[j] & 0xFFFF0000u)));
            }
        }
        peak = nan_max(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = nan_max(peak, __shfl_xor_sync(~0u, peak, 2));
        scale = peak > 0.0f ? peak / 448.0f : 1.0f;
        const Divisor divisor(scale);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs[i] = make_uint4(query_pair(pairs[i].x, divisor), query_pair(pairs[i].y, divisor),
                                  query_pair(pairs[i].z, divisor), query_pair(pairs[i].w, divisor));
#endif
        return scale;
    }
};

// score_S = (relu(dots_HS) * factors_H[:, None]).sum(0) of two keys, which four lanes have
// together: sums[first + i] are heads 8 i + 2 (lane % 4) and the next one of the first key, then of
// the second.
template <int COUNT>
__device__ __forceinline__ void sum_heads(float (&score)[2], const float (&sums)[COUNT][4],
                                          int first, const float2 (&factors)[HEADS / 8]) {
    score[0] = score[1] = 0.0f;
#pragma unroll
    for (int tile = 0; tile < HEADS / 8; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float(&dots)[4] = sums[first + tile];
            score[half] = fmaf(nan_max(dots[2 * half], 0.0f), factors[tile].x, score[half]);
            score[half] = fmaf(nan_max(dots[2 * half + 1], 0.0f), factors[tile].y, score[half]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        score[half] += __shfl_xor_sync(~0u, score[half], 1);
        score[half] += __shfl_xor_sync(~0u, score[half], 2);
    }
}

// Of 16 keys of a warp, the one whose score this lane writes, if lane % 4 < 2.
__device__ __forceinline__ int written_key(int lane) { return lane / 4 + 8 * (lane % 2); }

__device__ __forceinline__ void write_score(unsigned* row, int entry, int visible, int lane,
                                            const float (&score)[2], float key_scale, int* nan) {
    const float mine = (lane % 2 ? score[1] : score[0]) * key_scale;
    if (lane % 4 < 2 && entry < visible) {
        row[entry] = order_of(mine);
        note_nan(nan, mine);
    }
}
