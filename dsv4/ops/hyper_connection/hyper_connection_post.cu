// x'_k = post_k · y + Σ_j comb_jk · x_j of every token. Defines: STREAMS (M), COUNT columns per
// thread (8 or 1), LEFT (1: comb is not balanced yet), SETTLED (1: all but y was complete when the
// kernel started), RANKS (above 1: y comes as words of all ranks, exchange.cuh), OWNERS (ranks that
// share the tokens).
#include "columns.cuh"
#include "exchange.cuh"
#include "sinkhorn.cuh"

#ifndef LEFT
#define LEFT 0
#endif
#ifndef SETTLED
#define SETTLED 0
#endif

extern "C" __global__ void hc_post(const bf16* y, const bf16* streams, const float* post,
                                   const float* comb, bf16* out, const int64* peers,
                                   int64 slot, int64 rank_words, int exchange, int owner,
                                   int tokens, int width, float hc_eps, int iterations) {
    const InboxAddress address(peers);
    pdl_launch();
    if (!SETTLED) pdl_wait();
    const int64 token = own_token(blockIdx.y, owner);
    const int64 column_0 = ((int64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (column_0 >= width || (OWNERS > 1 && token >= tokens)) return;
    Columns<COUNT> stream[STREAMS];
    float shares[STREAMS], factors[STREAMS][STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++) {
        stream[j] = load_columns<COUNT>(streams + (token * STREAMS + j) * width + column_0);
        shares[j] = post[token * STREAMS + j];
    }
    fill(factors, [&](int j, int k) { return comb[(token * STREAMS + j) * STREAMS + k]; });
    if (LEFT) sinkhorn(factors, hc_eps, iterations);
    if (SETTLED) pdl_wait();
#if RANKS > 1
    float sums[COUNT];
    Inbox(address, slot, rank_words, exchange).sum(token * width + column_0, sums);
    const Columns<COUNT> added = round_columns(sums);
#else
    const Columns<COUNT> added = load_columns<COUNT>(y + token * width + column_0);
#endif
#pragma unroll
    for (int k = 0; k < STREAMS; k++) {
        float values[COUNT];
#pragma unroll
        for (int c = 0; c < COUNT; c++) values[c] = 0.0f;
#pragma unroll
        for (int j = 0; j < STREAMS; j++) {
#pragma unroll
            for (int c = 0; c < COUNT; c++)
                values[c] = fmaf(factors[j][k], column(stream[j], c), values[c]);
        }
#pragma unroll
        for (int c = 0; c < COUNT; c++) values[c] = fmaf(shares[k], column(added, c), values[c]);
        store_columns(out + (token * STREAMS + k) * width + column_0, round_columns(values));
    }
}
