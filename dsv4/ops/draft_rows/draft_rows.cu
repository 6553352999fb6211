// What the rows of a draft module are made of (dsv4/ops/draft_rows/__init__.py).
#include "common.cuh"

// One block.
extern "C" __global__ void begin_rows(const int64* position, const int64* rejected, int shift,
                                      int64* rows_position, int64* rows_rejected,
                                      const int64* token, int64* tokens, int count, int noise) {
    pdl_launch();
    pdl_wait();
    const int t = threadIdx.x;
    if (t == 0) *rows_position = *position - *rejected + shift, *rows_rejected = 0;
    if (t < count) tokens[t] = t == 0 ? *token : noise;
}

// A block for every token.
extern "C" __global__ void token_mixing(const int64* positions, float* post, float* comb,
                                        int streams) {
    pdl_wait();
    pdl_launch();
    const int token = blockIdx.x;
    const float share = positions[token] > 0 ? 1.0f : 0.0f;
    for (int i = threadIdx.x; i < streams; i += blockDim.x) post[token * streams + i] = share;
    for (int i = threadIdx.x; i < streams * streams; i += blockDim.x)
        comb[token * streams * streams + i] = i / streams == i % streams ? 1.0f : 0.0f;
}

// The slot of a position that may be −1.
__device__ __forceinline__ int64 slot_of(int64 position, int slots) {
    const int64 slot = position % slots;
    return slot < 0 ? slot + slots : slot;
}

// `parts` pieces of 16 bytes of every token, tokens along y. Slots that are read and slots that are
// written differ, because there are more of them than tokens.
extern "C" __global__ void shift_streams(const uint4* streams, uint4* ring, const int64* first,
                                         uint4* rows, int slots, int parts) {
    pdl_launch();
    pdl_wait();
    const int part = blockIdx.x * blockDim.x + threadIdx.x;
    if (part >= parts) return;
    const int64 token = blockIdx.y;
    const int64 position = *first;
    const uint4 value = streams[token * parts + part];
    const uint4 before = token > 0 ? streams[(token - 1) * parts + part]
                                   : ring[slot_of(position, slots) * parts + part];
    rows[token * parts + part] = before;
    ring[slot_of(position + 1 + token, slots) * parts + part] = value;
}

extern "C" __global__ void recall_streams(const uint4* ring, const int64* position, uint4* row,
                                          int slots, int parts) {
    pdl_launch();
    pdl_wait();
    const int part = blockIdx.x * blockDim.x + threadIdx.x;
    if (part < parts) row[part] = ring[slot_of(*position, slots) * parts + part];
}
