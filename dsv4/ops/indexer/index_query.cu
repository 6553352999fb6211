// Index queries (dsv4/ops/indexer/__init__.py), one warp per head.
#include "index_row.cuh"

#ifndef WIDTH
#define WIDTH 128
#endif
#ifndef ROPE
#define ROPE 64
#endif
// Whether q begins at a multiple of 8 bytes.
#ifndef ALIGNED
#define ALIGNED 1
#endif

// Block (x, y): token y, `heads_per_block` heads from x · heads_per_block on.
extern "C" __global__ void __launch_bounds__(256)
    index_query(const bf16* q, const int64* positions, const float* inv_freq, bf16* out, int heads,
                int heads_per_block, float normaliser) {
    using Row = IndexRow<WIDTH, ROPE, ALIGNED>;
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int first = blockIdx.x * heads_per_block + warp;
    const int stop = min((int)(blockIdx.x + 1) * heads_per_block, heads);
    WarpTurns<ROPE / 2> of_token;
    of_token.fetch(inv_freq);
    pdl_launch();
    pdl_wait();
    const int64 position = positions[blockIdx.y];
    Row::Turns turns;
    for (int head = first; head < stop; head += warps) {
        const int64 start = ((int64)blockIdx.y * heads + head) * WIDTH;
        Row row;
        row.load(q + start);
        if (head == first) {
            // The same for every head of the token; computed while the first row is on its way.
            of_token.move_to(position);
            Row::pick(of_token, turns);
        }
        row.rotate_by(turns);
        row.store_rotated(out + start, normaliser);
    }
}
