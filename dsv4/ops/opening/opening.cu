// The opening of a step: the positions of its tokens, and on the first device their embedding.
#include "common.cuh"

// positions = f, f + 1, ... from f = p − r on; p becomes f + T and r 0. `step` (or null) counts the
// steps that ranks exchange words in. For all threads of one block.
__device__ __forceinline__ void take_positions(int64* position, int64* rejected, unsigned* step,
                                               int64* positions, int tokens) {
    const int64 first = *position - *rejected;
    __syncthreads();  // everyone has read them
    for (int t = threadIdx.x; t < tokens; t += blockDim.x) positions[t] = first + t;
    if (threadIdx.x == 0) *position = first + tokens, *rejected = 0;
    if (threadIdx.x == 0 && step != nullptr) *step += 1;
}

// streams = table[tokens].unsqueeze(1).repeat(1, M, 1), a Part of a row per thread, tokens along x.
template <typename Part>
__device__ __forceinline__ void embed_parts(const int64* tokens, int64* position, int64* rejected,
                                            unsigned* step, const Part* table, int64* positions,
                                            Part* streams, int rows, int parts, int copies) {
    pdl_wait();
    pdl_launch();
    const int64 token = tokens[blockIdx.x];
    if (blockIdx.x == 0 && blockIdx.y == 0)
        take_positions(position, rejected, step, positions, gridDim.x);
    if (token < 0 || token >= rows) __trap();
    const int part = blockIdx.y * blockDim.x + threadIdx.x;
    if (part >= parts) return;
    const Part value = table[token * parts + part];
    Part* first = streams + (int64)blockIdx.x * copies * parts + part;
    for (int m = 0; m < copies; m++) first[(int64)m * parts] = value;
}

extern "C" __global__ void embed(const int64* tokens, int64* position, int64* rejected,
                                 unsigned* step, const uint4* table, int64* positions,
                                 uint4* streams, int rows, int parts, int copies) {
    embed_parts(tokens, position, rejected, step, table, positions, streams, rows, parts,
                copies);
}

extern "C" __global__ void embed_any_geometry(const int64* tokens, int64* position, int64* rejected,
                                              unsigned* step, const bf16* table, int64* positions,
                                              bf16* streams, int rows, int parts, int copies) {
    embed_parts(tokens, position, rejected, step, table, positions, streams, rows, parts,
                copies);
}

extern "C" __global__ void next_positions(int64* position, int64* rejected, int64* positions,
                                          int tokens) {
    pdl_wait();
    pdl_launch();
    take_positions(position, rejected, nullptr, positions, tokens);
}
