// A row of Width bf16 values of the indexer in the registers of one warp: rotary embedding,
// rounded, then the Hadamard rotation (dsv4/ops/indexer/__init__.py). Lane l holds the PER_LANE
// consecutive values from l · PER_LANE on. Width is a power of two. Aligned: rows that are loaded
// begin at multiples of 8 bytes; those that are stored always do.
#pragma once
#include "hadamard.cuh"
#include "rope.cuh"

template <int Width, int Rope, bool Aligned = true>
struct IndexRow {
    static constexpr int PER_LANE = Width > WARP ? Width / WARP : 1;
    static constexpr int LANES = Width / PER_LANE;
    static constexpr int PLAIN = Width - Rope;
    using Turns = Turn[(PER_LANE + 1) / 2];  // of the lane's pairs

    float values[PER_LANE];

    static __device__ __forceinline__ int first() { return threadIdx.x % WARP * PER_LANE; }

    static __device__ __forceinline__ void pick(const WarpTurns<Rope / 2>& of_token, Turns& turns) {
#pragma unroll
        for (int i = 0; i < PER_LANE; i += 2)
            turns[i / 2] = of_token.of(max(first() + i - PLAIN, 0) / 2);
    }

    __device__ __forceinline__ void load(const bf16* row) {
        if constexpr (PER_LANE == 4 && Aligned) {
            const uint2 raw = *reinterpret_cast<const uint2*>(row + first());
            values[0] = __uint_as_float(raw.x << 16),
            values[1] = __uint_as_float(raw.x & 0xFFFF0000u);
            values[2] = __uint_as_float(raw.y << 16),
            values[3] = __uint_as_float(raw.y & 0xFFFF0000u);
        } else {
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                values[i] = first() + i < Width ? __bfloat162float(row[first() + i]) : 0.0f;
        }
    }

    __device__ __forceinline__ void rotate_by(const Turns& turns) {
        if constexpr (PER_LANE == 1) {
            const bool odd = threadIdx.x % 2;
            const float other = __shfl_xor_sync(~0u, values[0], 1);
            const float2 pair =
                odd ? rotate(other, values[0], turns[0]) : rotate(values[0], other, turns[0]);
            if (first() >= PLAIN)
                values[0] = __bfloat162float(__float2bfloat16(odd ? pair.y : pair.x));
        } else {
#pragma unroll
            for (int i = 0; i < PER_LANE; i += 2) {
                if (first() + i < PLAIN) continue;
                const float2 pair = rotate(values[i], values[i + 1], turns[i / 2]);
                values[i] = __bfloat162float(__float2bfloat16(pair.x));
                values[i + 1] = __bfloat162float(__float2bfloat16(pair.y));
            }
        }
    }

    // torch: hadamard(row), stored in bf16; `normaliser` is Width^-½.
    __device__ __forceinline__ void store_rotated(bf16* row, float normaliser) {
        warp_hadamard<LANES>(values);
        if constexpr (PER_LANE == 4) {
            const __nv_bfloat162 low =
                __floats2bfloat162_rn(values[0] * normaliser, values[1] * normaliser);
            const __nv_bfloat162 high =
                __floats2bfloat162_rn(values[2] * normaliser, values[3] * normaliser);
            *reinterpret_cast<uint2*>(row + first()) =
                make_uint2(*reinterpret_cast<const unsigned*>(&low),
                           *reinterpret_cast<const unsigned*>(&high));
        } else {
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                if (first() + i < Width)
                    row[first() + i] = __float2bfloat16(values[i] * normaliser);
            }
        }
    }
};
