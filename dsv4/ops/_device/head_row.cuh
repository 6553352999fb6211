// A row of Width bf16 values in the registers of one warp: queries and window keys, which are
// normalised, rotated and stored, keys as the cache's format says. Width and Rope are multiples of
// 8; for fp8 rows Width − Rope is a multiple of 64.
#pragma once
#include "kv_rows.cuh"
#include "rope.cuh"

template <int Width, int Rope>
struct HeadRow {
    static constexpr int VECTOR = 8;  // bf16 values in 16 bytes
    static constexpr int CHUNKS = Width / VECTOR;
    static constexpr int PER_LANE = (CHUNKS + WARP - 1) / WARP;
    static constexpr int FIRST_ROTARY = (Width - Rope) / VECTOR;

    union Packed {
        uint4 raw;
        __nv_bfloat162 pairs[VECTOR / 2];
    };
    // One entry per chunk of a lane; its chunks are lane, lane + 32, ...
    using Factors = float[PER_LANE][VECTOR];
    using Turns = Turn[PER_LANE][VECTOR / 2];

    Packed values[PER_LANE];

    static __device__ __forceinline__ int chunk_of(int i) { return threadIdx.x % WARP + i * WARP; }

    // The norm weights; constants only.
    static __device__ __forceinline__ void fetch(const float* weight, Factors& factors) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            if (chunk_of(i) < CHUNKS)
                fetch_constants<VECTOR>(weight + chunk_of(i) * VECTOR, factors[i]);
        }
    }

    // This lane's turns.
    static __device__ __forceinline__ void pick(const WarpTurns<Rope / 2>& of_token, Turns& turns) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            if ((i + 1) * WARP <= FIRST_ROTARY) continue;
            const int first = max(chunk_of(i) - FIRST_ROTARY, 0) * (VECTOR / 2);
#pragma unroll
            for (int j = 0; j < VECTOR / 2; ++j) turns[i][j] = of_token.of(first + j);
        }
    }

    __device__ __forceinline__ void load(const bf16* row) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            values[i].raw = chunk_of(i) < CHUNKS ? load_written(row + chunk_of(i) * VECTOR)
                                                 : make_uint4(0, 0, 0, 0);
        }
    }

    // torch: rms_norm(row, weight, eps), rounded to bf16.
    __device__ __forceinline__ void normalise(const Factors* weight, float eps) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
#pragma unroll
            for (int j = 0; j < VECTOR / 2; ++j) {
                const float2 pair = __bfloat1622float2(values[i].pairs[j]);
                squares += pair.x * pair.x + pair.y * pair.y;
            }
        }
        const float inverse = rsqrtf(warp_sum(squares) / Width + eps);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
#pragma unroll
            for (int j = 0; j < VECTOR / 2; ++j) {
                const float2 pair = __bfloat1622float2(values[i].pairs[j]);
                float2 scaled = make_float2(pair.x * inverse, pair.y * inverse);
                if (weight) scaled.x *= (*weight)[i][2 * j], scaled.y *= (*weight)[i][2 * j + 1];
                values[i].pairs[j] = __floats2bfloat162_rn(scaled.x, scaled.y);
            }
        }
    }

    __device__ __forceinline__ void rotate_by(const Turns& turns) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            if ((i + 1) * WARP <= FIRST_ROTARY || chunk_of(i) < FIRST_ROTARY ||
                chunk_of(i) >= CHUNKS)
                continue;
#pragma unroll
            for (int j = 0; j < VECTOR / 2; ++j) {
                const float2 pair = __bfloat1622float2(values[i].pairs[j]);
                const float2 turned = rotate(pair.x, pair.y, turns[i][j]);
                values[i].pairs[j] = __floats2bfloat162_rn(turned.x, turned.y);
            }
        }
    }

    __device__ __forceinline__ void store(bf16* row) const {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            if (chunk_of(i) < CHUNKS)
                *reinterpret_cast<uint4*>(row + chunk_of(i) * VECTOR) = values[i].raw;
        }
    }

    // As store_row of kv_rows.cuh: a group of 64 values is the chunks of 8 neighbouring lanes.
    __device__ __forceinline__ void store_key(const RowStore& rows, int64 slot) const {
        unsigned char* out = rows.row(slot);
        if (rows.format == ROW_BF16) return store(reinterpret_cast<bf16*>(out));
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int chunk = chunk_of(i);
            float2 pairs[VECTOR / 2];
            unsigned amax = 0;
#pragma unroll
            for (int j = 0; j < VECTOR / 2; ++j) {
                pairs[j] = __bfloat1622float2(values[i].pairs[j]);
                amax = max(amax, max(__float_as_uint(fabsf(pairs[j].x)),
                                     __float_as_uint(fabsf(pairs[j].y))));
            }
            if (rows.format == ROW_F32) {
#pragma unroll
                for (int j = 0; j < VECTOR / 2 && chunk < CHUNKS; ++j) {
                    *reinterpret_cast<float2*>(reinterpret_cast<float*>(out) + chunk * VECTOR +
                                               2 * j) = pairs[j];
                }
                continue;
            }
#pragma unroll
            for (int offset = 1; offset < KV_GROUP / VECTOR; offset *= 2) {
                amax = max(amax, __shfl_xor_sync(~0u, amax, offset));
            }
            if (chunk >= FIRST_ROTARY) {
                if (chunk < CHUNKS)
                    *reinterpret_cast<uint4*>(out + (2 * chunk - FIRST_ROTARY) * VECTOR) =
                        values[i].raw;
                continue;
            }
            const int code = kv_scale_code(amax);
            const float factor = e8m0_reciprocal(code);
            uint2 codes = make_uint2(0, 0);
            codes.x = floats_to_e4m3x2(pairs[0].x * factor, pairs[0].y * factor) |
                      (unsigned)floats_to_e4m3x2(pairs[1].x * factor, pairs[1].y * factor) << 16;
            codes.y = floats_to_e4m3x2(pairs[2].x * factor, pairs[2].y * factor) |
                      (unsigned)floats_to_e4m3x2(pairs[3].x * factor, pairs[3].y * factor) << 16;
            *reinterpret_cast<uint2*>(out + chunk * VECTOR) = codes;
            if (chunk % (KV_GROUP / VECTOR) == 0)
                rows.row_scale(slot)[chunk / (KV_GROUP / VECTOR)] = code;
        }
        if (rows.format != ROW_KV_FP8) return;
        const int scales = (Width - Rope) / KV_GROUP;
        for (int i = scales + threadIdx.x % WARP; i < rows.scale_bytes(); i += WARP)
            rows.row_scale(slot)[i] = 0;
    }
};
