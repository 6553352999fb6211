// x of the step on its way to shared memory, where the products with w1 and w3 read it.
//
// Defines: those of moe_decode.cu.
#pragma once
#include "f16_factor.cuh"
#include "moe_products.cuh"
#include "moe_scores.cuh"
#include "moe_shape.cuh"
#include "weight_tile.cuh"

__device__ __forceinline__ unsigned pack_f16(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// Eight consecutive bfloat16 of a row, zeros beyond E.
__device__ __forceinline__ uint4 load_row8(const bf16* row, int k, int E) {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (!TAILS || E % 8 == 0) {
        if (k < E) raw = __ldcg(reinterpret_cast<const uint4*>(row + k));
        return raw;
    }
    unsigned word[4] = {0, 0, 0, 0};
    for (int i = 0; i < 8; ++i)
        if (k + i < E)
            word[i / 2] |= unsigned(__ldcg(reinterpret_cast<const unsigned short*>(row) + k + i))
                           << (16 * (i & 1));
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ float largest8(const uint4& raw) {
    float value = 0.0f;
    const unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        value = fmaxf(value, fmaxf(fabsf(bf16_low(word[i])), fabsf(bf16_high(word[i]))));
    return value;
}

// Eight consecutive k (from a multiple of 8) of a token, where Activations look for them.
__device__ __forceinline__ void store_activations(char* to, const uint4& raw, int token, int k,
                                                  int tokens, float factor, bool as_f16) {
    char* at = to + ((k >> 5) * tokens + token) * 64;
    unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
    if (as_f16) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair)
            word[pair] = pack_f16(bf16_low(word[pair]) * factor, bf16_high(word[pair]) * factor);
    }
    const int turn = SPREADS ? 0 : store_turn<TOKENS>(threadIdx.x % WARP);
    rotate(word, turn);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair)
        *reinterpret_cast<unsigned*>(at + word_at((k >> 1 & 12) + (pair + turn) % 4)) = word[pair];
}

// Columns of the staged activations: whole stages, zeros behind the end.
__device__ __forceinline__ int stage_padded(int columns) {
    return TAILS ? (columns + STAGE_COLUMNS - 1) / STAGE_COLUMNS * STAGE_COLUMNS : columns;
}

// Activations of the step, in shared memory once per 16-bit type that a weight format needs:
// measure, a barrier, stage, a barrier. Up to TOKENS_AT_ONCE stay in registers between the two;
// more are read again.
struct Inputs {
    char *f16, *bf16_rows;
    // [token][warp] largest magnitudes.
    float* largest;
    uint4 rows[TOKENS_AT_ONCE][VECTORS];

    __device__ __forceinline__ void load(const bf16* x_TE, int first, int T, int E) {
#pragma unroll
        for (int t = 0; t < TOKENS_AT_ONCE; ++t)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                rows[t][i] = load_row8(x_TE + size_t(min(first + t, T - 1)) * E,
                                       (threadIdx.x + i * THREADS) * 8, E);
    }

    // Also multiplies with the block's rows of the gate; parts: float [T, GATE_ROWS, WARPS] in
    // shared memory.
    __device__ __forceinline__ void measure(const bf16* x_TE, int T, int E, const GateRows& gate,
                                            float* parts) {
        const int warp = warp_index(), lane = threadIdx.x % WARP;
#pragma unroll 1
        for (int first = 0; first < (TOKENS > TOKENS_AT_ONCE ? T : 1); first += TOKENS_AT_ONCE) {
            load(x_TE, first, T, E);
#pragma unroll
            for (int t = 0; t < TOKENS_AT_ONCE; ++t) {
                float value = 0.0f;
#pragma unroll
                for (int i = 0; i < VECTORS; ++i) value = fmaxf(value, largest8(rows[t][i]));
                value = warp_max_magnitude(value);
                const int token = first + t;
                if (lane == 0 && token < T) largest[token * WARPS + warp] = value;
                float products[GATE_PLACES] = {};
#pragma unroll
                for (int row = 0; row < GATE_ROWS; ++row)
                    products[row] = gate.product(row, rows[t]);
                const float sum = warp_sums(products);
                const int row = lane / (WARP / GATE_PLACES);
                if (lane % (WARP / GATE_PLACES) == 0 && row < GATE_ROWS && token < T)
                    parts[(token * GATE_ROWS + row) * WARPS + warp] = sum;
            }
        }
    }

    __device__ __forceinline__ void stage(const bf16* x_TE, int T, int E, float* unscale) {
#pragma unroll 1
        for (int first = 0; first < (TOKENS > TOKENS_AT_ONCE ? T : 1); first += TOKENS_AT_ONCE) {
            if (TOKENS > TOKENS_AT_ONCE) load(x_TE, first, T, E);
#pragma unroll
            for (int t = 0; t < TOKENS_AT_ONCE; ++t) {
                const int token = first + t;
                if (token >= T) break;
                const int lane = threadIdx.x % WARP;
                const float value =
                    warp_max_magnitude(lane < WARPS ? largest[token * WARPS + lane] : 0.0f);
                const float factor = f16_factor(value);
                if (threadIdx.x == 0) unscale[token] = inverse_power(factor);
#pragma unroll
                for (int i = 0; i < VECTORS; ++i) {
                    const int k = (threadIdx.x + i * THREADS) * 8;
                    if (k < stage_padded(E)) store(rows[t][i], token, k, T, factor);
                }
            }
        }
    }

    __device__ __forceinline__ void store(const uint4& raw, int token, int k, int T,
                                          float factor) const {
        if (ANY_F16) store_activations(f16, raw, token, k, T, factor, true);
        if (ANY_BF16) store_activations(bf16_rows, raw, token, k, T, factor, false);
    }
};
