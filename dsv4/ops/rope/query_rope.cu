// The inputs of attention: queries normalised per head without a weight, rounded and rotated
// (dsv4/ops/rope/__init__.py, query_rope), and, in the same launch, the window key row
// (dsv4/ops/kv_write/__init__.py). One warp per row of WIDTH values.
#include "head_row.cuh"

#ifndef WIDTH
#define WIDTH 512
#endif
#ifndef ROPE
#define ROPE 64
#endif

// Block (x, y): `rows_per_block` rows from x · rows_per_block on, of token y. Rows are the token's
// `heads` queries and, where `kv` is not null, the key row, which goes to slot position mod `slots`
// of the ring.
extern "C" __global__ void __launch_bounds__(256)
    query_rope(const bf16* q, const int64* positions, const float* inv_freq, bf16* out,
               const bf16* kv, const float* norm_weight, unsigned char* ring_data,
               unsigned char* ring_scale, int format, int slots, int heads, int rows_per_block,
               float eps) {
    using Row = HeadRow<WIDTH, ROPE>;
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int64 token = blockIdx.y;
    const int first = blockIdx.x * rows_per_block + warp;
    const int stop = min((int)(blockIdx.x + 1) * rows_per_block, heads + (kv ? 1 : 0));
    WarpTurns<ROPE / 2> of_token;
    of_token.fetch(inv_freq);
    pdl_launch();
    if (kv && stop > heads) {
        for (int i = threadIdx.x * WARP; i < WIDTH; i += blockDim.x * WARP)
            prefetch_l2(norm_weight + i);
    }
    pdl_wait();
    const int64 position = positions[token];
    Row::Turns turns;
    for (int index = first; index < stop; index += warps) {
        const bool key = index == heads;
        Row row;
        row.load(key ? kv + token * WIDTH : q + (token * heads + index) * WIDTH);
        if (index == first) {
            // The same for every row of the token; computed while the first row is on its way.
            of_token.move_to(position);
            Row::pick(of_token, turns);
        }
        if (key) {
            Row::Factors factors;
            Row::fetch(norm_weight, factors);
            row.normalise(&factors, eps);
            row.rotate_by(turns);
            // Of position −1 too: a draft module has rows before the first one, which nobody reads.
            const int64 slot = position < 0 ? position + slots : position % slots;
            row.store_key(RowStore{ring_data, ring_scale, format, WIDTH, ROPE}, slot);
        } else {
            row.normalise(nullptr, eps);
            row.rotate_by(turns);
            row.store(out + (token * heads + index) * WIDTH);
        }
    }
}

// Queries of any width up to 4096 and any even rotary width. One block per head (x) and token (y).
extern "C" __global__ void __launch_bounds__(128)
    query_rope_any_geometry(const bf16* q, const int64* positions, const float* inv_freq, bf16* out,
                            int heads, int width, int rope_width, float eps) {
    __shared__ float scratch[WARP + 1];
    pdl_launch();
    pdl_wait();
    const int64 position = positions[blockIdx.y];
    const int64 start = ((int64)blockIdx.y * heads + blockIdx.x) * width;
    float squares = 0.0f;
    for (int d = threadIdx.x; d < width; d += blockDim.x) {
        const float value = __bfloat162float(q[start + d]);
        squares += value * value;
    }
    const float inverse = rsqrtf(block_sum(squares, scratch) / width + eps);
    const auto normalised = [&](int d) {
        return __float2bfloat16(__bfloat162float(q[start + d]) * inverse);
    };
    const int plain = width - rope_width;
    for (int d = threadIdx.x; d < plain; d += blockDim.x) out[start + d] = normalised(d);
    for (int pair = threadIdx.x; pair < rope_width / 2; pair += blockDim.x) {
        const int d = plain + 2 * pair;
        const float2 turned =
            rotate(__bfloat162float(normalised(d)), __bfloat162float(normalised(d + 1)),
                   rope_turn(position, inv_freq[pair]));
        out[start + d] = __float2bfloat16(turned.x);
        out[start + d + 1] = __float2bfloat16(turned.y);
    }
}
