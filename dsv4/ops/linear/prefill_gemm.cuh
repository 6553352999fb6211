// Weight-only matrix products of many tokens: y[t, n] = sum_k x[t, k] * W[n, k], W dequantized to
// bf16 in registers.
//
// The weights are the A operand (rows of W along M, in the packed fragment order), tokens are N. A
// block of 8 consumer warps and 4 producer warps computes 16 row tiles of 16 rows times up to 128
// tokens; warp w owns row tiles w and 8 + w. Of experts that have few tokens 12 consumer warps
// compute 24 row tiles times up to 32 or 64 tokens: what such tiles wait for are the instructions
// that copy and decode weights. Blocks are persistent: the producer runs ahead of the consumers
// across tile borders, so that the next tile's operands arrive during this tile's epilogue.
//
// MODE_LINEAR   y = x * W^T, with batches (grouped linear) and split K (fixed order of summation)
// MODE_GATE_UP  h = bf16(routing weight * silu(min(gate, limit)) * clamp(up)), gathered tokens
// MODE_DOWN     float rows of W2 * h, scattered to (token, slot)
//
// -DWGMMA=1 multiplies by wgmma (sm_90a only); else by mma.sync. Operand layouts in registers and
// shared memory agree.
#pragma once
#include "prefill_consume.cuh"

// ---------------------------------------------------------------- producer

// One stage's data or scales of all row tiles, BYTES each, in 16-byte parts. Bulk copies would be
// 16 or 32 a stage, and one warp issues about one in 75 clocks.
template <int BYTES>
__device__ __forceinline__ void copy_weights(u32 to, const unsigned char* const (&from)[SIDES],
                                             const int (&first)[SIDES], int last, int stride,
                                             int thread) {
    constexpr int COPIERS = PRODUCERS * WARP;
    constexpr int PER_TILE = BYTES / 16;
    constexpr int PARTS = ROW_TILES * PER_TILE;
    constexpr int APART = COPIERS / PER_TILE;  // row tiles between the parts of one thread
#pragma unroll
    for (int i = 0; i * COPIERS < PARTS; i++) {
        const int place = thread / PER_TILE + i * APART;
        const int side = APART <= CONSUMERS ? i * APART / CONSUMERS : place / CONSUMERS;
        const int tile = min((side ? first[1] : first[0]) + place % CONSUMERS, last);
        if (PARTS % COPIERS == 0 || place < ROW_TILES)
            cp_async16(to + (thread + i * COPIERS) * 16,
                       (side ? from[1] : from[0]) +
                           (u64)((u32)tile * (u32)(stride / 16) + thread % PER_TILE) * 16,
                       16);
    }
}

// Eight threads copy one row's 128 bytes of x; 16-byte chunk c of row r goes to place c ^ (r % 8).
__device__ __forceinline__ void produce(const Gemm& g, Pipe pipe) {
    constexpr int ROWS = TOKENS / (PRODUCERS * WARP / 8);  // of one thread
    constexpr int APART = TOKENS / ROWS;                   // between them
    const int thread = threadIdx.x - CONSUMERS * WARP;
    const int chunk = thread % 8;
    const int row = thread / 8;
    const u32 place = row * 128 + ((chunk ^ (row % 8)) << 4);
    const int steps = g.steps(), last = g.row_tiles - 1;
    Pipe landed = pipe;
    int waiting = 0;  // stages issued and not announced
    for (int index = blockIdx.x; index < g.total(); index += gridDim.x) {
        const Tile t = tile_at(g, index);
        const int rows = 8 * token_blocks(t.count);
        u32 offset[ROWS];  // in 16-byte units: a register less than a pointer
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            // x_TK = x[slots // per_token]
            int source = t.first + min(row + i * APART, t.count - 1);
            if (MODE == MODE_GATE_UP && g.slots) source = g.slots[source] / g.per_token;
            offset[i] = source * (g.x_stride / 8);
        }
        const int first[SIDES] = {first_row_tile(g, t, 0), first_row_tile(g, t, 1)};
        const int64 skipped = (int64)t.expert * g.row_tiles * steps + t.first_step;
        const unsigned char* data[SIDES] = {g.side[0].data + skipped * WEIGHT_BYTES,
                                            g.side[1].data + skipped * WEIGHT_BYTES};
        const unsigned char* scale[SIDES] = {g.side[0].scale + skipped * SCALE_BYTES,
                                             g.side[1].scale + skipped * SCALE_BYTES};
        const bf16* x = g.x + t.batch * g.batch_stride;
        for (int step = t.first_step; step < t.last_step; step++) {
            pipe.wait_empty();
            const u32 buffer = pipe.buffer();
            copy_weights<WEIGHT_BYTES>(buffer + X_BYTES, data, first, last, steps * WEIGHT_BYTES,
                                       thread);
            if constexpr (SCALE_BYTES > 0)
                copy_weights<SCALE_BYTES>(buffer + X_BYTES + ROW_TILES * WEIGHT_BYTES, scale, first,
                                          last, steps * SCALE_BYTES, thread);
            for (int side = 0; side < SIDES; side++)
                data[side] += WEIGHT_BYTES, scale[side] += SCALE_BYTES;
            const int column = step * STEP + chunk * 8;
            const int valid = max(0, min(16, 2 * (g.columns - column)));
            const bf16* from = x + (valid ? column : 0);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (i * APART < rows)
                    cp_async16(buffer + place + i * APART * 128, from + (u64)offset[i] * 8,
                               row + i * APART < t.count ? valid : 0);
            cp_async_commit();
            pipe.advance();
            if (waiting == LAG) {
                cp_async_wait<LAG>();
                announce(landed.full_barrier());
                landed.advance();
            } else {
                waiting++;
            }
        }
    }
    cp_async_wait<0>();
    for (; waiting > 0; waiting--) {
        announce(landed.full_barrier());
        landed.advance();
    }
    if (thread == 0) pipe.drain();
}

// Shared memory: STAGES stages from a 1024-byte border, then barriers. 2048 bytes besides the
// stages.
__device__ __forceinline__ void run(const Gemm& g, const Output& out) {
    extern __shared__ unsigned char shared[];
    const u32 base = shared_address(shared), stages = (base + 1023) / 1024 * 1024;
    unsigned char* rest = shared + (stages - base) + STAGES * STAGE_BYTES;
    const u32 full = shared_address(rest);
    const Pipe pipe = {stages, full, full + 8 * STAGES, 0, 0};
    static_assert(16 * STAGES <= 1024, "barriers");
    static_assert(STAGES * STAGE_BYTES + 2048 <= SHARED_BYTES, "as the launchers count it");
    static_assert(STAGES > LAG + 1, "the consumers hold one stage while the next is announced");
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(pipe.full + 8 * i, PRODUCERS);
            barrier_init(pipe.empty + 8 * i, CONSUMERS);
        }
        barrier_fence();
        proxy_fence();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS * WARP) {
        fewer_registers<PRODUCER_REGISTERS>();
        produce(g, pipe);
    } else {
        more_registers<CONSUMER_REGISTERS>();
        consume(g, out, pipe);
    }
}

#if LIST
// y_i [tokens, rows of matrix i] = x [tokens, columns] times matrix i, for all matrices of a list.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_rows(const bf16* x, const unsigned char* weight_data,
                 const unsigned char* weight_block_scale, const float* weight_global_scale,
                 const int4* table, unsigned char* y, float4* parts, int* counters, int tokens,
                 int columns, int row_tiles, int matrices, int first_tile, int capacity,
                 int x_stride, int splits) {
    pdl_wait();
    pdl_launch();
    Gemm g;
    g.x = x, g.x_stride = x_stride;
    g.side[0] = g.side[1] = {weight_data, weight_block_scale, weight_global_scale};
    g.row_tiles = row_tiles, g.columns = columns, g.rows = 16 * row_tiles;
    g.tokens = tokens, g.splits = splits, g.tile_count = token_tiles(tokens);
    g.list = {table, matrices, first_tile, capacity};
    run(g, {y, 0, nullptr, 0.0f, parts, counters});
}
#elif MODE == MODE_LINEAR
// x [tokens, batches, columns] (strides in elements), weight [batches * rows, columns], y [tokens,
// batches, rows] with an even y_stride for bf16.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_linear(const bf16* x, const unsigned char* weight_data,
                   const unsigned char* weight_block_scale, const float* weight_global_scale,
                   void* y, float4* parts, int* counters, int tokens, int rows, int columns,
                   int row_tiles, int x_stride, int batch_stride, int y_stride, int batches,
                   int splits) {
    pdl_wait();
    pdl_launch();
    Gemm g;
    g.x = x, g.x_stride = x_stride, g.batch_stride = batch_stride;
    g.side[0] = g.side[1] = {weight_data, weight_block_scale, weight_global_scale};
    g.row_tiles = row_tiles, g.columns = columns, g.rows = rows;
    g.tokens = tokens, g.batches = batches, g.splits = splits;
    g.tile_count = token_tiles(tokens);
    run(g, {y, y_stride, nullptr, 0.0f, parts, counters});
}
#elif MODE == MODE_GATE_UP
// h[i] = gated products of x[slots[i] / per_token]; without tiles: of x[i] for every token, with
// weight 1, and perhaps with splits.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_gate_up(const bf16* x, const unsigned char* w1_data,
                    const unsigned char* w1_block_scale, const float* w1_global_scale,
                    const unsigned char* w3_data, const unsigned char* w3_block_scale,
                    const float* w3_global_scale, const int4* tiles, const int* tile_count,
                    const int* slots, const float* routing, bf16* h, float4* parts, int* counters,
                    int tokens, int rows, int columns, int row_tiles, int x_stride, int h_stride,
                    int per_token, float limit, int splits) {
    pdl_wait();
    pdl_launch();
    Gemm g;
    g.x = x, g.x_stride = x_stride;
    g.side[0] = {w1_data, w1_block_scale, w1_global_scale};
    g.side[1] = {w3_data, w3_block_scale, w3_global_scale};
    g.row_tiles = row_tiles, g.columns = columns, g.rows = rows;
    g.tokens = tokens, g.splits = splits;
    g.tiles = tiles, g.slots = slots, g.per_token = per_token;
    g.tile_count = tiles ? *tile_count : token_tiles(tokens);
    run(g, {h, h_stride, routing, limit, parts, counters});
}
#else
// y[slots[i]] = W2[expert of i] * h[i], float rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_down(const bf16* h, const unsigned char* w2_data, const unsigned char* w2_block_scale,
                 const float* w2_global_scale, const int4* tiles, const int* tile_count,
                 const int* slots, float* y, int rows, int columns, int row_tiles, int h_stride) {
    pdl_wait();
    pdl_launch();
    Gemm g;
    g.x = h, g.x_stride = h_stride;
    g.side[0] = g.side[1] = {w2_data, w2_block_scale, w2_global_scale};
    g.row_tiles = row_tiles, g.columns = columns, g.rows = rows;
    g.tiles = tiles, g.slots = slots, g.tile_count = *tile_count;
    run(g, {y, rows, nullptr, 0.0f, nullptr, nullptr});
}
#endif
