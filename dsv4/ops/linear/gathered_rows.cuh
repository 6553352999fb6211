// The products of a list of matrices whose row tiles the ranks share: words of every rank, which
// are gathered by the kernel that multiplies the first product. Each of its blocks takes that one
// from the words; all of them together store the products in memory, for the kernels behind.
//
// A rank has `shared_tiles` neighbouring tiles of either format, as many as every other one: the
// last ranks may share some. Its words are [tile][token][row], those of the first format in front.
#pragma once
#include "decode_products.cuh"

__device__ __forceinline__ int shared_tiles(int tiles) { return (tiles + RANKS - 1) / RANKS; }

// `table`, of a list with first_tiles and second_tiles tiles of two formats, as of a Product, in
// shared memory. x_tile: where the first product begins. The products go to `memory`.
struct GatheredRows {
    int64 slot, rank_words;
    int exchange;
    const int4* table;
    int matrices, first_tiles, second_tiles, x_tile;
    char* memory;
    InboxAddress address;
    Inbox inbox;

    // Before pdl_wait.
    __device__ __forceinline__ void reach(const int64* peers) {
        if constexpr (GATHERS) address = InboxAddress(peers);
    }

    // Behind it.
    __device__ __forceinline__ void open() {
        if constexpr (GATHERS) inbox = Inbox(address, slot, rank_words, exchange);
    }

    struct Place {
        int rank;
        int64 index;
    };

    // Where the words of a tile are.
    __device__ __forceinline__ Place place(int tile) const {
        const bool second = tile >= first_tiles;
        const int nth = second ? tile - first_tiles : tile;
        const int tiles = second ? second_tiles : first_tiles, share = shared_tiles(tiles);
        const int rank = unsigned(nth) / unsigned(share);
        const int before = second ? shared_tiles(first_tiles) : 0;
        return {rank, (before + nth - min(rank * share, tiles - share)) * (int64)TILE_OUTPUTS};
    }

    // x_TK = the first product as it is rounded, by the block into shared memory: [token][stride],
    // zeros behind its columns. A thread has all tokens of its columns, whose place it computes
    // once: here the block waits for instructions. Ends with a barrier.
    __device__ __forceinline__ void find_first(bf16* x, int columns, int stride) const {
        constexpr int COUNT = 2;
        for (int column = COUNT * threadIdx.x; column < stride; column += COUNT * THREADS) {
            float values[TOKENS][COUNT] = {};
            if (column < columns) {
                const Place at = place(x_tile + column / TILE_ROWS);
                inbox.find(at.index + column % TILE_ROWS, at.rank, TILE_ROWS, values);
            }
#pragma unroll
            for (int n = 0; n < TOKENS; ++n) {
                if (column + 1 >= columns) values[n][1] = 0.0f;
                store_columns(x + n * stride + column, round_columns(values[n]));
            }
        }
        __syncthreads();
    }

    // products_TN = words, by all blocks; a thread for each word. The last warps first, because
    // those have no tiles to finish.
    __device__ __forceinline__ void store() const {
        const int count = (first_tiles + second_tiles) * TILE_OUTPUTS;
        const int group = (WARPS - 1 - warp_index()) * gridDim.x + blockIdx.x;
        const int step = WARPS * gridDim.x * WARP;
        for (int i = group * WARP + threadIdx.x % WARP; i < count; i += step) {
            const int tile = i / TILE_OUTPUTS, output = i % TILE_OUTPUTS;
            const Place at = place(tile);
            const float value = inbox.find(at.index + output, at.rank);
            int4 matrix = table[0];
            for (int m = 1; m < matrices; ++m)
                if (tile >= table[m].x) matrix = table[m];
            const int row = (tile - matrix.x) * TILE_ROWS + output % TILE_ROWS;
            if (row >= matrix.y) continue;
            char* product = memory + (int64)matrix.z * TOKENS;
            const int64 to = (int64)(output / TILE_ROWS) * matrix.y + row;
            if (matrix.w) reinterpret_cast<float*>(product)[to] = value;
            else reinterpret_cast<bf16*>(product)[to] = __float2bfloat16(value);
        }
    }
};

// Rows of the first product, [token][stride] in shared memory, as stage_activations takes them.
struct FirstProduct {
    const bf16* rows;
    int stride;

    template <int HELD, int T>
    __device__ __forceinline__ void load(uint4 (&pieces)[HELD][T], int first, int step) const {
#pragma unroll
        for (int b = 0; b < HELD; ++b) {
            const int column = first + b * step;
#pragma unroll
            for (int n = 0; n < T; ++n)
                pieces[b][n] =
                    column < stride
                        ? *reinterpret_cast<const uint4*>(rows + n * stride + column)
                        : make_uint4(0, 0, 0, 0);
        }
    }
};
