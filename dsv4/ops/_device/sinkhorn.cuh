// The doubly stochastic matrix of a seam by Sinkhorn iterations: one warp for each token.
#pragma once
#include "common.cuh"

// One half of a Sinkhorn iteration: own_j ← own_j / (own_j · Σ_k kernel_jk · other_k + eps).
// Returns the largest distance of a divisor 1 − e from 1. The reciprocal is 1 + e + … + e^(TERMS −
// 1) where |e| is known to be small enough for float32, and comes from the special function unit,
// which takes longer, if TERMS is 0.
constexpr float FOR_8_TERMS = 0.1f;
constexpr float FOR_3_TERMS = 3e-3f;
constexpr float SETTLED = 2.5e-7f;

template <int TERMS, bool TRANSPOSED, int M>
__device__ __forceinline__ float balance(float (&own)[M], const float (&other)[M],
                                         const float (&kernel)[M][M], float eps) {
    float change = 0.0f;
#pragma unroll
    for (int j = 0; j < M; j++) {
        float dot = (TRANSPOSED ? kernel[0][j] : kernel[j][0]) * other[0];
#pragma unroll
        for (int k = 1; k < M; k++)
            dot = fmaf(TRANSPOSED ? kernel[k][j] : kernel[j][k], other[k], dot);
        const float e = fmaf(-own[j], dot, 1.0f - eps), square = e * e;
        change = fmaxf(change, fabsf(e));
        if constexpr (TERMS == 3) {
            own[j] = fmaf(own[j], fmaf(e, e, e), own[j]);
        } else if constexpr (TERMS == 8) {
            const float four = fmaf(square, 1.0f + e, 1.0f + e);
            own[j] *= fmaf(square * square, four, four);
        } else {
            own[j] = __fdividef(own[j], fmaf(own[j], dot, eps));
        }
    }
    return change;
}

// kernel_jk = element(j, k).
template <int M, typename Element>
__device__ __forceinline__ void fill(float (&kernel)[M][M], Element element) {
#pragma unroll
    for (int j = 0; j < M; j++)
#pragma unroll
        for (int k = 0; k < M; k++) kernel[j][k] = element(j, k);
}

// A lane's elements lane, lane + 32, … of comb [M][M].
template <int M>
struct Comb {
    static constexpr int HELD = (M * M + WARP - 1) / WARP;
    float values[HELD];

    __device__ __forceinline__ void store(float* comb) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (i * WARP + lane < M * M) comb[i * WARP + lane] = values[i];
    }
};

// comb_MM, whose rows and columns sum up to 1, of kernel_MM, whose rows do: comb_jk = rows_j ·
// kernel_jk · columns_k, by scaling factors. Every lane computes all of it, which saves the
// exchange between lanes. Divisors only come closer to 1. Once an iteration changes nothing by more
// than a rounding, the rest would not either.
template <int M>
__device__ __forceinline__ Comb<M> sinkhorn(const float (&kernel)[M][M], float eps,
                                            int iterations) {
    float rows[M], columns[M];
#pragma unroll
    for (int j = 0; j < M; j++) rows[j] = columns[j] = 1.0f;
    // In turn: comb /= comb.sum(-2, keepdim=True) + eps; comb /= comb.sum(-1, keepdim=True) + eps
    float change = 1.0f;
    balance<0, true>(columns, rows, kernel, eps);
    int iteration = 1;
    for (; iteration < iterations && change > FOR_8_TERMS; iteration++) {
        change = balance<0, false>(rows, columns, kernel, eps);
        change = fmaxf(change, balance<0, true>(columns, rows, kernel, eps));
    }
    for (; iteration < iterations && change > FOR_3_TERMS; iteration++) {
        change = balance<8, false>(rows, columns, kernel, eps);
        change = fmaxf(change, balance<8, true>(columns, rows, kernel, eps));
    }
    for (; iteration < iterations && change > SETTLED; iteration++) {
        change = balance<3, false>(rows, columns, kernel, eps);
        change = fmaxf(change, balance<3, true>(columns, rows, kernel, eps));
    }
    const int lane = threadIdx.x % WARP;
    Comb<M> comb;
#pragma unroll
    for (int j = 0; j < M; j++) {
#pragma unroll
        for (int k = 0; k < M; k++)
            if (lane == (j * M + k) % WARP)
                comb.values[(j * M + k) / WARP] = rows[j] * kernel[j][k] * columns[k];
    }
    return comb;
}
