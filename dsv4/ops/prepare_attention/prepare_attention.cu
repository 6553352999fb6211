// Everything between a layer's projections and its attention in one launch, for a decode step
// (dsv4/ops/prepare_attention/__init__.py): blocks pool the compressors' windows, warps rotate
// queries and write the window key. No part reads what another one writes.
//
// STREAMS: 0, or those of a seam that has left its comb, which a warp for each token computes.
// RATIO: 0 (no compressor), 4 or 128, with GROUPS and BLOCKS of its main compressor as in
// compressor.cuh; INDEX_WIDTH: 0 (no indexer) or the width of its rows. Formats are those of
// kv_rows.cuh. The compute dtype is bfloat16.
#include "compressor.cuh"
#include "head_row.cuh"
#include "index_row.cuh"
#include "sinkhorn.cuh"

#ifndef WIDTH
#define WIDTH 512
#define ROPE 64
#define KEY_FORMAT ROW_KV_FP8
#define RATIO 4
#define GROUPS 1
#define BLOCKS 1
#define INDEX_WIDTH 128
#define INDEX_FORMAT ROW_INDEX_FP8
#define INDEX_GROUPS 4
#define ROW_WARPS 8
#define STREAMS 4
#endif

constexpr int THREADS = RATIO ? 512 : WARP * ROW_WARPS, INDEX_RATIO = 4;
constexpr int MAIN_BLOCKS = RATIO ? BLOCKS : 0;
constexpr int INDEX_BLOCKS = INDEX_WIDTH ? 1 : 0;
constexpr int MAIN_FLOATS = RATIO ? window_floats<GROUPS>(WIDTH / BLOCKS, THREADS) : 1;
constexpr int INDEX_FLOATS = INDEX_WIDTH ? window_floats<INDEX_GROUPS>(INDEX_WIDTH, THREADS) : 1;
constexpr int SEAM_ROWS = STREAMS ? 1 : 0;

// Block (x, y): first the blocks of the main compressor's y-th window, then the indexer's, then
// ROW_WARPS rows each of token y: the seam's comb, which takes longest, the window key, `heads`
// queries, `index_heads` index queries. gridDim.y is the number of tokens.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prepare_attention(const settled_int64* positions, const float* inv_freq, const bf16* q,
                      bf16* q_out, int heads, const bf16* index_q, bf16* index_q_out,
                      int index_heads, const bf16* kv, const float* kv_norm,
                      unsigned char* ring_data, unsigned char* ring_scale, int ring_slots,
                      const float* main_kv,
                      const float* main_score, const float* main_ape, const float* main_norm,
                      float* main_ring_kv, float* main_ring_score, unsigned char* main_data,
                      unsigned char* main_scale, int main_row_slots, int main_ring_slots,
                      const float* keys_kv, const float* keys_score, const float* keys_ape,
                      const float* keys_norm, float* keys_ring_kv, float* keys_ring_score,
                      unsigned char* keys_data, unsigned char* keys_scale, int keys_row_slots,
                      int keys_ring_slots, float eps, float index_normaliser,
                      const settled_float* unbalanced, float* comb, float hc_eps,
                      int iterations) {
    __shared__ __align__(16) float shared[MAIN_FLOATS > INDEX_FLOATS ? MAIN_FLOATS : INDEX_FLOATS];
    const int token = blockIdx.y, tokens = gridDim.y;
    if constexpr (RATIO > 0) {
        if (blockIdx.x < MAIN_BLOCKS) {
            // compress(kv, score, compressor)
            constexpr int COLUMNS = RATIO == INDEX_RATIO ? 2 * WIDTH : WIDTH;
            const Compression step{main_kv,
                                   main_score,
                                   main_ape,
                                   main_norm,
                                   inv_freq,
                                   main_ring_kv,
                                   main_ring_score,
                                   {main_data, main_scale, KEY_FORMAT, WIDTH, ROPE},
                                   main_row_slots,
                                   main_ring_slots,
                                   tokens,
                                   COLUMNS,
                                   COLUMNS,
                                   false,
                                   true,
                                   eps,
                                   1.0f};
            return compress_window<RATIO, GROUPS, BLOCKS, true>(step, positions, blockIdx.x, token,
                                                                true, shared);
        }
    }
    if constexpr (INDEX_WIDTH > 0) {
        if (blockIdx.x == MAIN_BLOCKS) {
            // compress(index_kv, index_score, indexer.compressor)
            constexpr int COLUMNS = 2 * INDEX_WIDTH;
            const Compression step{keys_kv,
                                   keys_score,
                                   keys_ape,
                                   keys_norm,
                                   inv_freq,
                                   keys_ring_kv,
                                   keys_ring_score,
                                   {keys_data, keys_scale, INDEX_FORMAT, INDEX_WIDTH, ROPE},
                                   keys_row_slots,
                                   keys_ring_slots,
                                   tokens,
                                   COLUMNS,
                                   COLUMNS,
                                   true,
                                   true,
                                   eps,
                                   index_normaliser};
            return compress_window<INDEX_RATIO, INDEX_GROUPS, 1, true>(step, positions, 0, token,
                                                                       true, shared);
        }
    }
    const int warp = threadIdx.x / WARP;
    const int row =
        ((int)blockIdx.x - MAIN_BLOCKS - INDEX_BLOCKS) * ROW_WARPS + warp - SEAM_ROWS;
    if (warp >= ROW_WARPS || row > heads + index_heads) return;
    if constexpr (STREAMS > 0) {
        if (row < 0) {
            // comb = sinkhorn(unbalanced), of the seam in front of these projections
            constexpr int M = STREAMS ? STREAMS : 1;
            const int first = token * M * M;
            float balanced[M][M];
            fill(balanced,
                 [&](int j, int k) { return fetch_settled(unbalanced + first + j * M + k); });
            pdl_launch();
            sinkhorn(balanced, hc_eps, iterations);
            pdl_wait();
            store_comb(balanced, comb + first);
            return;
        }
    }
    using Row = HeadRow<WIDTH, ROPE>;
    const bool key = row == 0;
    WarpTurns<ROPE / 2> of_token;
    Row::Factors weight;
    of_token.fetch(inv_freq);
    if (key) Row::fetch(kv_norm, weight);
    pdl_launch();
    const int64 position = fetch_settled(positions + token);
    of_token.move_to(position);
    const int64 key_slot = key ? position % ring_slots : 0;
    if (row <= heads) {
        const int64 start = ((int64)token * heads + row - 1) * WIDTH;
        Row values;
        Row::Turns turns;
        Row::pick(of_token, turns);
        pdl_wait();
        values.load(key ? kv + (int64)token * WIDTH : q + start);
        if (key) {
            // ring[position % ring_slots] = pack(rope(rms_norm(kv, kv_norm), position))
            values.normalise(&weight, eps);
            values.rotate_by(turns);
            values.store_key(RowStore{ring_data, ring_scale, KEY_FORMAT, WIDTH, ROPE},
                             key_slot);
        } else {
            // q_out = rope(rms_norm(q), position)
            values.normalise(nullptr, eps);
            values.rotate_by(turns);
            values.store(q_out + start);
        }
        return;
    }
    if constexpr (INDEX_WIDTH > 0) {
        // index_q_out = hadamard(rope(index_q, position)) * index_normaliser
        using Index = IndexRow<INDEX_WIDTH, ROPE>;
        const int64 start = ((int64)token * index_heads + row - 1 - heads) * INDEX_WIDTH;
        Index values;
        Index::Turns turns;
        Index::pick(of_token, turns);
        pdl_wait();
        values.load(index_q + start);
        values.rotate_by(turns);
        values.store_rotated(index_q_out + start, index_normaliser);
    }
}
