// The softmax of attention_decode over a block's keys, tile by tile.
#pragma once
#include "attention_decode_block.cuh"

// Running maximum (of logits times log2 e) of one head, and the lane's part of the sum; LANES lanes
// per head.
constexpr int LANES = THREADS / HEADS;

struct Softmax {
    float peak = -CUDART_INF_F, sum = 0.0f;

    // Turns the logits of a tile into weights 2^(logit - peak) and writes them and the factor for
    // what came before.
    __device__ __forceinline__ void tile(Shared& shared, int rows, int padded, float scale_log2) {
        constexpr int STEPS = (TILE + 4 * LANES - 1) / (4 * LANES);
        const int head = threadIdx.x / LANES, column = threadIdx.x % LANES * 4;
        float logits[STEPS][4], highest = -CUDART_INF_F;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int x = column + step * 4 * LANES;
#pragma unroll
            for (int i = 0; i < 4; ++i) logits[step][i] = -CUDART_INF_F;
            if (x >= padded) continue;
            float4 total = *reinterpret_cast<const float4*>(&shared.logits[0][head][x]);
#pragma unroll
            for (int pair = 1; pair < 4; ++pair) {
                const float4 part = *reinterpret_cast<const float4*>(&shared.logits[pair][head][x]);
                total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
            }
            const float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (tile_row(x + i) < rows) logits[step][i] = values[i] * scale_log2;
                highest = fmaxf(highest, logits[step][i]);
            }
        }
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2)
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, offset));
        const float raised = fmaxf(peak, highest);
        const float before = exp2_fast(peak - raised);
        float added = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int x = column + step * 4 * LANES;
            if (x >= padded) continue;
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[i] = exp2_fast(logits[step][i] - raised);
                added += p[i];
                p[i] *= 1 << WEIGHT_LOG2;
            }
            if constexpr (FP8) {
                *reinterpret_cast<uint2*>(&shared.weights[head][x]) = make_uint2(
                    bits(__floats2half2_rn(p[0], p[1])), bits(__floats2half2_rn(p[2], p[3])));
            }
            *reinterpret_cast<uint2*>(&shared.weights_bf16[head][x]) = make_uint2(
                bits(__floats2bfloat162_rn(p[0], p[1])), bits(__floats2bfloat162_rn(p[2], p[3])));
        }
        sum = sum * before + added;
        peak = raised;
        if (column == 0) shared.rescale[head] = before;
    }

    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2)
            sum += __shfl_xor_sync(~0u, sum, offset);
    }
};
