// Top-k of tokens whose scores are in memory; see top_k_held.cuh and top_k.cuh. One cluster of
// CLUSTER blocks per token; with CLUSTER 1, or when few entries are visible, one block does the
// work.
#ifndef CLUSTER
#define CLUSTER 8
#endif
#ifndef THREADS
#define THREADS 512
#endif
#ifndef STRIPS
#define STRIPS 16
#endif
#ifndef KEPT
#define KEPT 512
#endif
// Visible entries from which on the whole cluster works.
#ifndef SPREAD
#define SPREAD 16384
#endif
#ifndef SHARED_BYTES
#define SHARED_BYTES (200 << 10)
#endif
#include "exchange.cuh"
#include "top_k_held.cuh"

static_assert(sizeof(top_k::Shared) <= SHARED_BYTES);

#if OWNERS > 1
static_assert(CLUSTER == 1, "a block reads the list that it has written");

// The list, to its place `at` the other ranks.
__device__ __forceinline__ void send_list(const int64* list, const int64* peers, int64 at,
                                          int selected) {
    __syncthreads();
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
        int64* to = reinterpret_cast<int64*>(peers[CHOSEN + rank]) + at;
        if (to == list) continue;
        for (int i = threadIdx.x; i < selected; i += THREADS) to[i] = list[i];
    }
}
#endif

// `stride`: orders from one token to the next, a multiple of 4. Shared memory: SHARED_BYTES. With
// OWNERS the orders are of one rank's tokens, the first of which is number `first_token`, and
// the first of positions and out; the lists go to all ranks (exchange.cuh).
extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 256 ? 1 : 2)
    top_k_tokens(const unsigned* orders, const settled_int64* positions, int64* out, int slots,
                 int stride, int selected, const int64* peers, int first_token) {
    extern __shared__ __align__(16) char memory[];
    top_k::Shared& shared = *reinterpret_cast<top_k::Shared*>(memory);
    const int token = blockIdx.x / CLUSTER, rank = top_k::own_rank();
    // Without pdl_launch(): behind attention, which needs the list, blocks would request their
    // weights meanwhile, and every trip to L2 here would take longer.
    top_k::clear(shared);
    const int64 source = own_token(token, 0);
    const int visible = visible_entries(fetch_settled(positions + source), slots);
    pdl_wait();
    const unsigned* seen = orders + (int64)token * stride;
    int64* list = out + source * selected;
#if OWNERS > 1
    __syncthreads();
    if (visible <= selected) top_k::list_all(list, visible, selected, 0, 1);
    else top_k::select(shared, seen, visible, list, selected, false);
    send_list(list, peers, (first_token + source) * selected, selected);
#else
    if (visible <= selected) return top_k::list_all(list, visible, selected, rank, CLUSTER);
    const bool spread = CLUSTER > 1 && visible > SPREAD;
    if (rank > 0 && !spread) return;
    // The other blocks' counters must be zero before this block adds to them: waited for before the
    // first addition.
    if (spread) cluster_arrive();
    __syncthreads();
    top_k::select(shared, seen, visible, list, selected, spread);
#endif
}
