// The consumers of a block: the sums of tile after tile, and their results.
#pragma once
#include "prefill_parts.cuh"

template <int BLOCKS>
__device__ __forceinline__ void consume_tile(const Gemm& g, Tile& t, const Output& out, Pipe& pipe,
                                             int index) {
    const int warp = warp_index();
    const int lane = threadIdx.x % WARP;
    int slot[TOKENS / WARP] = {};
    float routing[TOKENS / WARP];
    float alpha[READ];
#pragma unroll
    for (int i = 0; i < TOKENS / WARP; i++) {
        const bool valid = i * WARP + lane < t.count;
        if (MODE == MODE_DOWN || (MODE == MODE_GATE_UP && g.slots))
            slot[i] = valid ? g.slots[t.first + i * WARP + lane] : 0;
        routing[i] = MODE == MODE_GATE_UP && out.routing && valid ? out.routing[slot[i]] : 1.0f;
    }
#pragma unroll
    for (int side = 0; side < READ; side++)
        alpha[side] = global_scale(g, t, side);
    Accumulators<BLOCKS> acc = {};
    float unit[READ];
    // y_NT = weight_NK @ x_TK.T
    accumulate<BLOCKS>(acc, unit, g, t, pipe, warp, lane);
#pragma unroll
    for (int side = 0; side < READ; side++) {
        if (SPLITS && FORMAT == FP8 && g.splits > 1) {
            // Splits may end at different mantissas.
            rescale(acc[side], unit[side] / UNIT);
            unit[side] = UNIT;
        }
        // y_NT *= global_scale, and the power of two of the dequantized weights
        alpha[side] *= unit[side];
    }
    if (SPLITS && g.splits > 1) return give_part<BLOCKS>(acc, out, index);
    const Tile done = t;
    // Read here, the next tile's entry arrives while this one's results are written.
    if (index + (int)gridDim.x < g.total()) t = tile_at(g, index + gridDim.x);
    store_tile<BLOCKS>(acc, alpha, g, done, out, slot, routing);
    // Lanes store apart. Unless they meet, ptxas moves all that products of the next tile share to
    // uniform registers in every stage.
    __syncwarp();
}

__device__ __forceinline__ void consume(const Gemm& g, const Output& out, Pipe pipe) {
    if (blockIdx.x >= g.total()) return;
    Tile t = tile_at(g, blockIdx.x);
    for (int index = blockIdx.x; index < g.total(); index += gridDim.x) {
        switch (token_blocks(t.count)) {
            case WIDTH_0:
                consume_tile<WIDTH_0>(g, t, out, pipe, index);
                break;
            case WIDTH_1:
                consume_tile<WIDTH_1>(g, t, out, pipe, index);
                break;
            default:
                consume_tile<TOKENS / 8>(g, t, out, pipe, index);
                break;
        }
        if (SPLITS && g.splits > 1) store_share(g, t, out, index);
    }
}
