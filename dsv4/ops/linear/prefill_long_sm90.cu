// Products of long steps on Hopper, and of experts in steps of all lengths, as prefill_gemm.cuh has
// them, with other copies: one thread has TMA copy a stage by boxes, x with the 128-byte swizzle,
// weights and block scales as they are packed. So rows of x lie in the order of the tiles.
//
// MODE_LINEAR has one side and tiles of 256 tokens: a dequantized fragment feeds a wgmma of 128
// clocks. Results go to memory in whole lines.
#define WGMMA 1
#define BOXES 1
#include "prefill_consume.cuh"
#include "tensor_map.cuh"

// Boxes have BOX_TOKENS tokens, and BOX_TILES row tiles of lines of 512 bytes.
constexpr int LINES = WEIGHT_BYTES / 512;
constexpr int MATRIX_TILES = ROW_TILES / MATRICES;
static_assert(TOKENS % BOX_TOKENS == 0 && MATRIX_TILES % BOX_TILES == 0, "whole boxes");

struct Maps {
    const TensorMap* x;
    const TensorMap* weight[MATRICES];
    const TensorMap* scale[MATRICES];
};

__device__ __forceinline__ void copy_stages(const Gemm& g, const Maps& maps, Pipe pipe) {
    const int steps = g.steps();
    for (int index = blockIdx.x; index < g.total(); index += gridDim.x) {
        const Tile t = tile_at(g, index);
        const int row_tile = t.expert * g.row_tiles + first_row_tile(g, t, 0);
        for (int step = 0; step < steps; step++) {
            pipe.wait_empty();
            const u32 full = pipe.full_barrier();
            barrier_expect(full, STAGE_USED);
            u32 to = pipe.buffer();
#pragma unroll
            for (int i = 0; i < TOKENS; i += BOX_TOKENS, to += BOX_TOKENS * 2 * STEP)
                copy_box(to, *maps.x, step * STEP, t.batch, t.first + i, full);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i += BOX_TILES, to += BOX_TILES * WEIGHT_BYTES)
                copy_box(to, *maps.weight[i / MATRIX_TILES], 0, step * LINES,
                         row_tile + i % MATRIX_TILES, full);
            if (SCALE_BYTES > 0)
#pragma unroll
                for (int i = 0; i < ROW_TILES; i += BOX_TILES, to += BOX_TILES * SCALE_BYTES)
                    copy_box(to, *maps.scale[i / MATRIX_TILES], 0, step,
                             row_tile + i % MATRIX_TILES, full);
            pipe.advance();
        }
    }
    pipe.drain();
}

// Shared memory: STAGES stages from a 1024-byte border, results on their way, barriers.
__device__ __forceinline__ void run(const Gemm& g, const Maps& maps, Output out) {
    extern __shared__ unsigned char shared[];
    const u32 base = shared_address(shared), stages = (base + 1023) / 1024 * 1024;
    out.staged = stages + STAGES * STAGE_BYTES;
    const u32 full = out.staged + RESULT_BYTES;
    const Pipe pipe = {stages, full, full + 8 * STAGES, 0, 0};
    static_assert(1023 + STAGES * STAGE_BYTES + RESULT_BYTES + 16 * STAGES <= SHARED_BYTES,
                  "as the launchers count it");
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(pipe.full + 8 * i, 1);
            barrier_init(pipe.empty + 8 * i, CONSUMERS);
        }
        barrier_fence();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS * WARP) {
        fewer_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS * WARP) copy_stages(g, maps, pipe);
    } else {
        more_registers<CONSUMER_REGISTERS>();
        consume(g, out, pipe);
    }
}

#if LIST
// y_i [tokens, rows of matrix i] = x [tokens, columns] times matrix i, for all matrices of a list.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    long_rows(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
              const __grid_constant__ TensorMap weight_scale,
              const unsigned char* weight_block_scale, const float* weight_global_scale,
              const int4* table, unsigned char* y, int tokens, int columns, int row_tiles,
              int matrices, int first_tile, int capacity) {
    pdl_wait();
    pdl_launch();
    Gemm g;
    g.side[0] = {nullptr, weight_block_scale, weight_global_scale};
    g.row_tiles = row_tiles, g.columns = columns, g.rows = 16 * row_tiles;
    g.tokens = tokens, g.tile_count = token_tiles(tokens);
    g.list = {table, matrices, first_tile, capacity};
    run(g, {&x, {&weight}, {&weight_scale}}, {y});
}
#elif MODE == MODE_LINEAR
// y [tokens, batches, rows] = x [tokens, batches, columns] times weight [batches * rows, columns];
// y_stride is a multiple of 8. `weight_block_scale`: of FP8, of other formats in boxes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    long_linear(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                const __grid_constant__ TensorMap weight_scale,
                const unsigned char* weight_block_scale, const float* weight_global_scale, void* y,
                int tokens, int rows, int columns, int row_tiles, int y_stride, int batches) {
    pdl_wait();
    pdl_launch();
    Gemm g;
    g.side[0] = {nullptr, weight_block_scale, weight_global_scale};
    g.row_tiles = row_tiles, g.columns = columns, g.rows = rows;
    g.tokens = tokens, g.batches = batches, g.tile_count = token_tiles(tokens);
    run(g, {&x, {&weight}, {&weight_scale}}, {y, y_stride});
}
#elif MODE == MODE_GATE_UP
// h[i] = gated products of x[i], with tiles times routing[slots[i]].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    long_gate_up(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w1,
                 const __grid_constant__ TensorMap w3, const __grid_constant__ TensorMap w1_scale,
                 const __grid_constant__ TensorMap w3_scale, const unsigned char* w1_block_scale,
                 const float* w1_global_scale, const unsigned char* w3_block_scale,
                 const float* w3_global_scale, const int4* tiles, const int* tile_count,
                 const int* slots, const float* routing, bf16* h, int tokens, int rows, int columns,
                 int row_tiles, int h_stride, float limit) {
    pdl_wait();
    pdl_launch();
    Gemm g;
    g.side[0] = {nullptr, w1_block_scale, w1_global_scale};
    g.side[1] = {nullptr, w3_block_scale, w3_global_scale};
    g.row_tiles = row_tiles, g.columns = columns, g.rows = rows;
    g.tokens = tokens, g.tiles = tiles, g.slots = slots;
    g.tile_count = tiles ? *tile_count : token_tiles(tokens);
    run(g, {&x, {&w1, &w3}, {&w1_scale, &w3_scale}}, {h, h_stride, routing, limit});
}
#else
// y[slots[i]] = W2[expert of i] * h[i], float rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    long_down(const __grid_constant__ TensorMap h, const __grid_constant__ TensorMap w2,
              const __grid_constant__ TensorMap w2_scale, const unsigned char* w2_block_scale,
              const float* w2_global_scale, const int4* tiles, const int* tile_count,
              const int* slots, float* y, int rows, int columns, int row_tiles) {
    pdl_wait();
    pdl_launch();
    Gemm g;
    g.side[0] = g.side[1] = {nullptr, w2_block_scale, w2_global_scale};
    g.row_tiles = row_tiles, g.columns = columns, g.rows = rows;
    g.tiles = tiles, g.slots = slots, g.tile_count = *tile_count;
    run(g, {&h, {&w2}, {&w2_scale}}, {y, rows});
}
#endif
