// x_sorted[i] = x[slots[i] / per_token]: the tokens of the pairs in the order of their experts.
#include "common.cuh"

// Rows of `width` values (a multiple of 8), `x_stride` apart in x. A block copies one; the pairs
// end with the last of the tiles {expert, first, pairs, 0}.
extern "C" __global__ void gather_rows(const bf16* x, const int* slots, const int4* tiles,
                                       const int* tile_count, bf16* sorted, int width,
                                       int x_stride, int per_token) {
    pdl_wait();
    pdl_launch();
    const int count = *tile_count;
    if (count == 0) return;
    const int4 last = tiles[count - 1];
    const int pair = blockIdx.x;
    if (pair >= last.y + last.z) return;
    const int64 token = slots[pair] / per_token;
    const uint4* from = reinterpret_cast<const uint4*>(x + token * x_stride);
    uint4* to = reinterpret_cast<uint4*>(sorted + (int64)pair * width);
    for (int i = threadIdx.x; i < width / 8; i += blockDim.x) to[i] = from[i];
}
