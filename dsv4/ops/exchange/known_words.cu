// Words that every rank can compute for all: what arrives is checked where it arrives, and the host
// reads no more than how many sums were wrong. For tests of what lies between the GPUs.
//
// Defines: RANKS.
#include "exchange.cuh"

// The value of a word: any sign and mantissa, an exponent of 16 in a row, so that every value shows
// in the sum. Other ones for every step, exchange, rank and index.
__device__ __forceinline__ float known(unsigned tag, int rank, int index) {
    unsigned bits = tag * 0x9e3779b1u ^ (rank + 1) * 0x85ebca77u ^ (index + 1) * 0xc2b2ae3du;
    bits = (bits ^ bits >> 16) * 0x7feb352du;
    bits = (bits ^ bits >> 15) * 0x846ca68bu;
    bits ^= bits >> 16;
    const unsigned exponent = 119 + (bits >> 23 & 15);
    return __uint_as_float((bits & 0x807fffffu) | exponent << 23);
}

// A rank's part of an exchange: one word a thread.
extern "C" __global__ void push_known(const int64* peers, int64 slot, int exchange, int rank,
                                      int count) {
    __shared__ Outbox outbox;
    pdl_launch();
    pdl_wait();
    if (threadIdx.x < WARP) outbox.open(peers, slot, exchange);
    __syncthreads();
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) outbox.push(at, known(outbox.tag, rank, at));
}

// wrong += how many of the sums are not, bit for bit, those of what the ranks push: two a thread.
extern "C" __global__ void check_known(const int64* peers, int64 slot, int64 rank_words,
                                       int exchange, int count, int* wrong) {
    const InboxAddress address(peers);
    pdl_launch();
    pdl_wait();
    const int at = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= count) return;
    const Inbox inbox(address, slot, rank_words, exchange);
    float sums[2];
    inbox.sum(at, sums);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float expected = known(inbox.tag, 0, at + i);
#pragma unroll
        for (int rank = 1; rank < RANKS; ++rank) expected += known(inbox.tag, rank, at + i);
        if (__float_as_uint(sums[i]) != __float_as_uint(expected)) atomicAdd(wrong, 1);
    }
}
