// The doubly stochastic matrix of a seam by Sinkhorn iterations. Every thread computes all of it,
// which saves the exchange between threads.
#pragma once
#include "common.cuh"

// One half of a Sinkhorn iteration: own_j ← own_j / (own_j · Σ_k kernel_jk · other_k + eps).
// Returns the largest distance of a divisor 1 − e from 1. The reciprocal is 1 + e + … + e^(TERMS −
// 1) where |e| is known to be small enough for float32, and comes from the special function unit,
// which takes longer, if TERMS is 0.
constexpr float FOR_8_TERMS = 0.1f;
constexpr float FOR_3_TERMS = 3e-3f;
constexpr float CONVERGED = 2.5e-7f;

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

// comb_jk = element(j, k).
template <int M, typename Element>
__device__ __forceinline__ void fill(float (&comb)[M][M], Element element) {
#pragma unroll
    for (int j = 0; j < M; j++)
#pragma unroll
        for (int k = 0; k < M; k++) comb[j][k] = element(j, k);
}

// comb_MM, whose rows and columns sum up to 1, in place of a matrix whose rows do: comb_jk =
// rows_j · comb_jk · columns_k, by scaling factors. Divisors only come closer to 1. Once an
// iteration changes nothing by more than a rounding, the rest would not either.
template <int M>
__device__ __forceinline__ void sinkhorn(float (&comb)[M][M], float eps, int iterations) {
    float rows[M], columns[M];
#pragma unroll
    for (int j = 0; j < M; j++) rows[j] = columns[j] = 1.0f;
    // In turn: comb /= comb.sum(-2, keepdim=True) + eps; comb /= comb.sum(-1, keepdim=True) + eps
    float change = 1.0f;
    balance<0, true>(columns, rows, comb, eps);
    int iteration = 1;
    for (; iteration < iterations && change > FOR_8_TERMS; iteration++) {
        change = balance<0, false>(rows, columns, comb, eps);
        change = fmaxf(change, balance<0, true>(columns, rows, comb, eps));
    }
    for (; iteration < iterations && change > FOR_3_TERMS; iteration++) {
        change = balance<8, false>(rows, columns, comb, eps);
        change = fmaxf(change, balance<8, true>(columns, rows, comb, eps));
    }
    for (; iteration < iterations && change > CONVERGED; iteration++) {
        change = balance<3, false>(rows, columns, comb, eps);
        change = fmaxf(change, balance<3, true>(columns, rows, comb, eps));
    }
#pragma unroll
    for (int j = 0; j < M; j++)
#pragma unroll
        for (int k = 0; k < M; k++) comb[j][k] = rows[j] * comb[j][k] * columns[k];
}

// By a warp, all of whose lanes have the matrix.
template <int M>
__device__ __forceinline__ void store_comb(const float (&comb)[M][M], float* address) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int first = 0; first < M * M; first += WARP) {
        float own = 0.0f;
#pragma unroll
        for (int i = first; i < min(first + WARP, M * M); i++)
            if (lane == i - first) own = comb[i / M][i % M];
        if (first + lane < M * M) address[first + lane] = own;
    }
}
