// What ranks do with each other beside the kernels that push and poll themselves.
//
// Defines: RANKS.
#include "exchange.cuh"

// A step that begins with no embedding gets a number of its own.
extern "C" __global__ void next_step(unsigned* step) {
    pdl_wait();
    if (threadIdx.x == 0) *step += 1;
}

// The first of the vocabulary's rows that a rank has: whole tiles of 16, as many or one less for
// each (dsv4/parallel/sharding.py).
__device__ __forceinline__ int first_row(int rank, int width) {
    const int tiles = (width + 15) / 16;
    return min((rank * tiles + RANKS - 1) / RANKS * 16, width);
}

// logits[t] = the rows of all ranks, one after the other: words [RANKS][T][rank_rows], of which a
// rank may have fewer. Blocks along x share the columns, those along y are the tokens.
extern "C" __global__ void gather_logits(const int64* peers, int64 slot, int exchange,
                                         float* logits, int rank_rows, int width) {
    pdl_launch();
    pdl_wait();
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    const int64 tokens = gridDim.y, token = blockIdx.y;
    int rank = 0;
    while (first_row(rank + 1, width) <= column) ++rank;
    const int first = first_row(rank, width), rows = first_row(rank + 1, width) - first;
    const int64 at = rank * tokens * rank_rows + token * rows + column - first;
    logits[token * width + column] = Inbox(peers, slot, 0, exchange).value(at, rank);
}

// y = bf16(words of rank 0 + of rank 1 + …): the result of a sublayer by itself.
extern "C" __global__ void sum_words(const int64* peers, int64 slot, int exchange, bf16* y,
                                     int count) {
    pdl_launch();
    pdl_wait();
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    float sums[1];
    Inbox(peers, slot, count, exchange).sum(at, sums);
    y[at] = __float2bfloat16(sums[0]);
}

// y = bf16(partial of rank 0 + of rank 1 + …); `own` is that of `rank`, arrived
// [RANKS][most][width] holds the others. Four values a thread.
extern "C" __global__ void sum_ranks(const float* own, const float* arrived, bf16* y, int rank,
                                     int64 rank_stride, int64 count) {
    pdl_launch();
    pdl_wait();
    const int64 first = ((int64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (first >= count) return;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
        const float* from = r == rank ? own : arrived + r * rank_stride;
        const float4 part = *reinterpret_cast<const float4*>(from + first);
        if (r == 0) sum = part;
        else sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    __nv_bfloat162* to = reinterpret_cast<__nv_bfloat162*>(y + first);
    to[0] = __floats2bfloat162_rn(sum.x, sum.y);
    to[1] = __floats2bfloat162_rn(sum.z, sum.w);
}
