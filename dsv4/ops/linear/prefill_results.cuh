// Where the sums of a tile go.
#pragma once
#include "prefill_tiles.cuh"

struct Output {
    void* y;
    int64 y_stride;        // elements between tokens
    const float* routing;  // MODE_GATE_UP: weight by (token, slot), or null: 1
    float limit;
    float4* parts;  // with splits: [tile][split][side][eight tokens][consumer thread]
    int* counters;  // with splits: of each tile, zero before and behind a launch
    u32 staged;     // BOXES: shared memory of RESULT_BYTES
};

// Float rows of STORED sides: eight lanes write one token's 32 bytes. `value(side, j, r)`: of eight
// tokens 2t and 2t + 1, of rows g and g + 8, which are `offset` behind the first ones of a block.
template <int BLOCKS, int STORED, typename Value>
__device__ __forceinline__ void store_float(const Value& value, int offset, const Gemm& g,
                                            const Tile& t, const Output& out,
                                            const int (&slot)[TOKENS / WARP]) {
    const int lane = threadIdx.x % WARP;
    const int row = t.row_block * ROWS_PER_BLOCK + offset + warp_index() * 16 + lane / 4;
    float* y = static_cast<float*>(out.y) + (int64)t.batch * g.rows + row;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int column = 8 * j + 2 * (lane % 4) + half;
            const int found = __shfl_sync(~0u, slot[j / 4], column % WARP);
            float* to = y + (MODE == MODE_DOWN ? found : t.first + column) * out.y_stride;
            if (column < t.count)
#pragma unroll
                for (int side = 0; side < STORED; side++)
#pragma unroll
                    for (int below = 0; below < 16; below += 8)
                        if (row + side * CONSUMERS * 16 + below < g.rows)
                            to[side * CONSUMERS * 16 + below] = value(side, j, below / 4 + half);
        }
}

// Two values of a row, rounded.
__device__ __forceinline__ u32 rounded(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const u32*>(&pair);
}

#if BOXES
#include "prefill_lines.cuh"
#else

// {row g; tokens 2t, 2t + 1} to {token g; rows 2t, 2t + 1}.
__device__ __forceinline__ u32 transpose(u32 pair) {
    u32 moved;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(moved) : "r"(pair));
    return moved;
}

// bf16 rows of stride y_stride (even): four lanes write one token's 16 bytes. Writes an even number
// of rows. `pairs(j)`: of eight tokens 2t and 2t + 1, of rows g and g + 8, which are `offset`
// behind the first ones of the block.
template <int BLOCKS, typename Pairs>
__device__ __forceinline__ void store_rounded(const Pairs& pairs, int offset, const Gemm& g,
                                              const Tile& t, const Output& out) {
    const int lane = threadIdx.x % WARP;
    const int row = t.row_block * ROWS_PER_BLOCK + offset + warp_index() * 16 + 2 * (lane % 4);
    bf16* y = static_cast<bf16*>(out.y) + (int64)t.batch * g.rows + row +
              (t.first + lane / 4) * out.y_stride;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        const uint2 pair = pairs(j);
        const u32 top = transpose(pair.x), bottom = transpose(pair.y);
        bf16* to = y + 8 * j * out.y_stride;
        if (8 * j + lane / 4 < t.count) {
            if (row < g.rows) *reinterpret_cast<u32*>(to) = top;
            if (row + 8 < g.rows) *reinterpret_cast<u32*>(to + 8) = bottom;
        }
    }
}
#endif

template <int BLOCKS>
__device__ __forceinline__ void store_side(const float (&acc)[BLOCKS][4], float alpha, int offset,
                                           const Gemm& g, const Tile& t, const Output& out) {
    const auto pairs = [&](int j) {
        const float(&c)[4] = acc[j];
        return make_uint2(rounded(c[0] * alpha, c[1] * alpha),
                          rounded(c[2] * alpha, c[3] * alpha));
    };
    store_rounded<BLOCKS>(pairs, offset, g, t, out);
}

// LIST: every side to the product of its matrix.
template <int BLOCKS>
__device__ __forceinline__ void store_list(const Accumulators<BLOCKS>& acc,
                                           const float (&alpha)[SIDES], const Gemm& g,
                                           const Tile& t, const Output& out,
                                           const int (&slot)[TOKENS / WARP]) {
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
        const int tile = t.row_block * ROW_TILES + side * CONSUMERS + warp_index();
        if (tile >= g.row_tiles) break;
        const int4 matrix = g.list.table[matrix_of(g.list, tile)];
        Gemm own = g;
        own.rows = matrix.y;
        Output product = out;
        product.y = static_cast<unsigned char*>(out.y) + (int64)g.list.capacity * matrix.z;
        product.y_stride = matrix.y;
        const int offset = 16 * (side * CONSUMERS - (matrix.x - g.list.first_tile));
        const auto value = [&](int, int j, int r) { return acc[side][j][r] * alpha[side]; };
        if (matrix.w) store_float<BLOCKS, 1>(value, offset, own, t, product, slot);
        else store_side<BLOCKS>(acc[side], alpha[side], offset, own, t, product);
    }
}

__device__ __forceinline__ float gated(float gate, float up, float weight, float limit) {
    // Comparisons, not fminf: a NaN must stay one.
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return __fdividef(gate, 1.0f + __expf(-gate)) * up * weight;
}

template <int BLOCKS>
__device__ __forceinline__ void store_gated(const Accumulators<BLOCKS>& acc,
                                            const float (&alpha)[READ], const Gemm& g,
                                            const Tile& t, const Output& out,
                                            const float (&routing)[TOKENS / WARP]) {
    const int lane = threadIdx.x % WARP;
    const auto h = [&](float gate, float up, int j, int r) {
        const float weight =
            __shfl_sync(~0u, routing[j / 4], (8 * j + 2 * (lane % 4) + r % 2) % WARP);
        // h = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * routing
        return gated(gate * alpha[0], up * alpha[READ - 1], weight, out.limit);
    };
    // Rows g of eight tokens, and rows g + 8 that the same row tiles have.
    const auto pair = [&](int j, int r) {
        const float(&gate)[4] = acc[0][j];
        const float(&up)[4] = acc[SIDES - 1][j];
        constexpr int UP = SHARED_TILES ? 2 : 0;
        return rounded(h(gate[r], up[UP + r], j, r), h(gate[r + 1], up[UP + r + 1], j, r + 1));
    };
#if BOXES
    if constexpr (SHARED_TILES) {
        store_shared<BLOCKS>([&](int j) { return pair(j, 0); }, g, t, out);
        return;
    }
#endif
    store_rounded<BLOCKS>([&](int j) { return make_uint2(pair(j, 0), pair(j, 2)); }, 0, g, t, out);
}

// `slot`, `routing`: of the tile's tokens, 32 at a time.
template <int BLOCKS>
__device__ __forceinline__ void store_tile(const Accumulators<BLOCKS>& acc,
                                           const float (&alpha)[READ], const Gemm& g,
                                           const Tile& t, const Output& out,
                                           const int (&slot)[TOKENS / WARP],
                                           const float (&routing)[TOKENS / WARP]) {
    if constexpr (MODE == MODE_GATE_UP)
        store_gated<BLOCKS>(acc, alpha, g, t, out, routing);
    else if constexpr (LIST) store_list<BLOCKS>(acc, alpha, g, t, out, slot);
    else if constexpr (MODE == MODE_DOWN || OUT_FLOAT)
        store_float<BLOCKS, SIDES>(
            [&](int side, int j, int r) { return acc[side][j][r] * alpha[side]; }, 0, g, t, out,
            slot);
    else
#pragma unroll
        for (int side = 0; side < SIDES; side++)
            store_side<BLOCKS>(acc[side], alpha[side], side * CONSUMERS * 16, g, t, out);
}
