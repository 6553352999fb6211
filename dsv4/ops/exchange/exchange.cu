// What ranks do with each other beside the kernels that push and poll themselves.
//
// Defines: RANKS, OWNERS (sum_ranks: RANKS, or 1 where every rank adds the rows of all tokens),
// COUNT (sum_ranks: values of a thread, 4, or 1 where rows are no whole vectors).
#include "exchange.cuh"

#ifndef COUNT
#define COUNT 4
#endif

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

// logits[t] = the rows of all ranks, one after the other, of which each has words [T][rows]. Blocks
// along x share the columns, those along y are the tokens.
extern "C" __global__ void gather_logits(const int64* peers, int64 slot, int64 rank_words,
                                         int exchange, float* logits, int width) {
    const InboxAddress address(peers);
    pdl_launch();
    pdl_wait();
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    const int64 token = blockIdx.y;
    int rank = 0;
    while (first_row(rank + 1, width) <= column) ++rank;
    const int first = first_row(rank, width), rows = first_row(rank + 1, width) - first;
    const Inbox inbox(address, slot, rank_words, exchange);
    logits[token * width + column] = inbox.find(token * rows + column - first, rank);
}

// y = bf16(words of rank 0 + of rank 1 + …): the result of a sublayer by itself.
extern "C" __global__ void sum_words(const int64* peers, int64 slot, int64 rank_words,
                                     int exchange, bf16* y, int count) {
    const InboxAddress address(peers);
    pdl_launch();
    pdl_wait();
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    float sums[1];
    Inbox(address, slot, rank_words, exchange).sum(at, sums);
    y[at] = __float2bfloat16(sums[0]);
}

// y = bf16(partial of rank 0 + of rank 1 + …), float32 rows from `first` on in the memory of every
// rank, which this kernel reads where it is: those of the tokens that are the rank's own. COUNT
// values a thread.
extern "C" __global__ void sum_ranks(const int64* peers, int64 first, bf16* y, int owner,
                                     int tokens, int width) {
    const float* from[RANKS];
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank)
        from[rank] = reinterpret_cast<const float*>(peers[PARTIALS + rank]) + first;
    pdl_launch();
    pdl_wait();
    const int64 own = ((int64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    const int64 token = own_token(own / width, owner);
    if (token >= tokens) return;
    const int64 at = token * width + own % width;
#if COUNT == 4
    float4 parts[RANKS];
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank)
        parts[rank] = *reinterpret_cast<const float4*>(from[rank] + at);
    float4 sum = parts[0];
#pragma unroll
    for (int rank = 1; rank < RANKS; ++rank) {
        sum.x += parts[rank].x, sum.y += parts[rank].y;
        sum.z += parts[rank].z, sum.w += parts[rank].w;
    }
    __nv_bfloat162* to = reinterpret_cast<__nv_bfloat162*>(y + at);
    to[0] = __floats2bfloat162_rn(sum.x, sum.y);
    to[1] = __floats2bfloat162_rn(sum.z, sum.w);
#else
    float sum = from[0][at];
#pragma unroll
    for (int rank = 1; rank < RANKS; ++rank) sum += from[rank][at];
    y[at] = __float2bfloat16(sum);
#endif
}
