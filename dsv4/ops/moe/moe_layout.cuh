// Weights of the experts' decode launch, on their way to the warps.
//
// Defines: those of moe_decode.cu.
#pragma once
#include "weight_tile.cuh"

// A packed matrix, or a stack of them, in memory.
struct PackedMatrix {
    const char *data, *block_scale;
    const float* global_scale;
};

// Of all routed experts, or of the shared one.
struct Experts {
    PackedMatrix w1, w3, w2;
};

// Where the stages of a packed matrix [rows, columns] (or a stack of them) lie.
template <int FORMAT>
struct Layout {
    int loads;
    unsigned tile_bytes, scale_tile_bytes, matrix_bytes, scale_matrix_bytes;

    __device__ __forceinline__ Layout(int rows, int columns) {
        const int tiles = (rows + 63) / 64 * 4;
        loads = (columns + 63) / 64 * (64 / Stage<FORMAT>::CHUNK);
        tile_bytes = loads * LOAD_BYTES;
        matrix_bytes = tiles * tile_bytes;
        scale_tile_bytes =
            FORMAT == FP8 ? (columns + 127) / 128 * 4 : loads * Stage<FORMAT>::CHUNK_SCALE;
        scale_matrix_bytes = (FORMAT == FP8 ? (rows + 127) / 128 : tiles) * scale_tile_bytes;
    }

    __device__ __forceinline__ int stages() const {
        return (loads + STAGE_LOADS - 1) / STAGE_LOADS;
    }

    __device__ __forceinline__ void fetch(unsigned slot, const char* data, const char* scale,
                                          int matrix, int tile, int stage, int lane) const {
        data += size_t(unsigned(matrix)) * matrix_bytes + (tile * tile_bytes + stage * STAGE_DATA);
        if (FORMAT == FP8)
            scale += size_t(unsigned(matrix)) * scale_matrix_bytes +
                     ((tile >> 3) * scale_tile_bytes + stage * 4);
        else if (FORMAT != BF16)
            scale += size_t(unsigned(matrix)) * scale_matrix_bytes +
                     (tile * scale_tile_bytes + stage * (STAGE_LOADS * Stage<FORMAT>::CHUNK_SCALE));
        stage_fetch<FORMAT, TAILS>(slot, data, scale, lane, loads - stage * STAGE_LOADS);
    }
};
