// z = W' · y, y = round(W · x) for one or two tokens in one launch: W the groups of one matrix, W'
// one that multiplies all that they give. What is computed, and in which order it is added up, is
// that of two launches of decode_linear, block by block and warp by warp, so the bits are the same.
//
// A warp streams its stages of W and then those of W' through one ring: memory works on while the
// sums of W meet and y goes from block to block. y travels as words that say themselves that they
// have arrived, so a block waits for these and not for other blocks to end.
//
// All blocks have to be resident at once: they wait for each other's words.
//
// Defines: FORMAT0 and FORMAT1 (of W and W'), TOKENS, WARPS, DEPTH, ALIGNED_X, RANKS as in
// decode_linear.cu; RAGGED0 and RAGGED1 (RAGGED_K of W and W'), PIECES0 (PIECES of W, whose x
// always fits into registers), PIECES1 and HOLDS_SLICE1 (of W').
#define CLUSTER 1
#define TURNS 1
#include "decode_products.cuh"
#include "hand_over.cuh"

// ---- y on its way -------------------------------------------------------------------------------

// Rows of bfloat16, [token][column], two columns a word (hand_over.cuh).
struct WordRows {
    char* words;
    int tokens, columns;

    __device__ __forceinline__ char* at(int token, int column) const {
        return words + (token * columns + column) * 2;
    }

    // Columns `column`, an even one, and the next one.
    __device__ __forceinline__ void send(int token, int column, float low, float high) const {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        publish(at(token, column), *reinterpret_cast<const unsigned*>(&pair));
    }

    // As StoredRows::load, once all of it has been published.
    template <int HELD, int T>
    __device__ __forceinline__ void load(uint4 (&pieces)[HELD][T], int first, int stride) const {
        const Deadline deadline;
        while (true) {
            unsigned least = ~0u;
#pragma unroll
            for (int b = 0; b < HELD; ++b) {
                const int column = first + b * stride;
#pragma unroll
                for (int n = 0; n < T; ++n)
                    pieces[b][n] = request_words(at(n, column), n < tokens && column < columns);
            }
#pragma unroll
            for (int b = 0; b < HELD; ++b) {
#pragma unroll
                for (int n = 0; n < T; ++n) {
                    least = min(least, least_word(pieces[b][n]));
                    pieces[b][n] = published(pieces[b][n]);
                }
            }
            if (least != 0) return;
            deadline.check();
        }
    }
};

// ---- both products ------------------------------------------------------------------------------

// Rows that are in registers already.
template <int HELD, int T>
struct HeldRows {
    const uint4 (&held)[HELD][T];

    __device__ __forceinline__ void load(uint4 (&pieces)[HELD][T], int, int) const {
#pragma unroll
        for (int b = 0; b < HELD; ++b)
#pragma unroll
            for (int n = 0; n < T; ++n) pieces[b][n] = held[b][n];
    }
};

// What the block has of a product; launches may have more blocks than a product is dealt to.
__device__ __forceinline__ Share share_of(const Product& p) {
    const int blocks = p.groups * p.first.clusters;
    Share share(p, min(int(blockIdx.x), blocks - 1));
    if (blockIdx.x >= blocks) share.end = share.begin;
    return share;
}

// The product with one packed matrix, or with its groups of `rows` rows each; every block has all
// of K.
struct MatrixProduct {
    const bf16* x;
    int row_stride, group_stride, tokens;
    char* y;
    int columns;
    Rows weight;
    int groups, rows, scale_shift;
    const float* global_scale;
    int float32_out;

    __device__ __forceinline__ operator Product() const {
        Product p = {x, row_stride, group_stride, tokens, nullptr, 0.0f, y, columns};
        p.slice_columns = p.padded_columns();
        p.first = weight, p.groups = groups, p.scale_shift = scale_shift;
        p.global_scale = global_scale, p.matrices = 1, p.rows = rows;
        p.float32_out = float32_out;
        return p;
    }
};

// x + token · row_stride + group · group_stride, [tokens, columns] → y [tokens, groups · rows] → z
// [tokens, z_rows], bfloat16 or float32. tiles0 and clusters0: row tiles and blocks per group.
// words: two halves of half_bytes, each with room for y; counter: LaunchNumber's. Both are zeros
// before the first launch, and launches that share them have the same half_bytes. Blocks from
// late_from on start when the kernel before has ended: they request x first and then weights,
// behind which x would have to queue; the others request weights and wait.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_pair(const bf16* x, int row_stride, int group_stride, int tokens, char* y, int columns,
                const char* data0, const char* scale0, int tiles0, int clusters0, int groups,
                int rows, const float* global_scale0, char* words, int half_bytes, int* counter,
                int late_from, char* z, const char* data1, const char* scale1, int tiles1,
                int clusters1, int z_rows, const float* global_scale1, int float32_out,
                int scale_shift, int x_bytes, int partial_bytes, const int64* peers, int64 slot,
                int exchange) {
    pdl_launch();
    extern __shared__ __align__(SLOT_LINE_BYTES) char shared[];
    __shared__ float inverses[2 * TOKENS], scratch[2 * TOKENS * WARP];
    __shared__ Outbox outbox;
    __shared__ Finish finishes[2 * WARPS];
    const int lane = threadIdx.x % WARP, warp = warp_index();
    char* x_shared = shared + WARPS * DEPTH * SLOT;
    float* partials = reinterpret_cast<float*>(x_shared + x_bytes);
    assert_shared_memory(x_shared - shared + x_bytes + partial_bytes);
    const Rows weight0 = {data0, scale0, tiles0, clusters0, 0};
    const Rows weight1 = {data1, scale1, tiles1, clusters1, 0};
    const Product first =
        MatrixProduct{x,       row_stride, group_stride, tokens,      y,             columns,
                      weight0, groups,     rows,         scale_shift, global_scale0, 0};
    const Product second =
        MatrixProduct{nullptr, 0, 0,      tokens,      z,             groups * rows,
                      weight1, 1, z_rows, scale_shift, global_scale1, float32_out};
    const Workspace space = {shared, x_shared, partials, inverses, scratch, &outbox, finishes};
    const Workspace next_space = {shared,  x_shared, partials,        inverses + TOKENS,
                                  scratch, &outbox,  finishes + WARPS};
    const Matrices matrix(first), next_matrix(second);
    const Share share = share_of(first), next_share = share_of(second);
    const WordHalves halves = {words, half_bytes};
    const LaunchNumber launch = {reinterpret_cast<unsigned long long*>(counter)};

    const StoredRows<ALIGNED_X> x_rows = {x + (int64)share.group * group_stride, row_stride, tokens,
                                          columns};
    uint4 pieces[PIECES0][TOKENS];
    unsigned number;
    const auto begin = [&] {
        pdl_wait();
        number = launch.read();
        x_rows.load(pieces, threadIdx.x * 8, THREADS * 8);
    };
    const bool late = blockIdx.x >= late_from;
    if (late) begin();
    Portion<FORMAT0, RAGGED0> own(first, first.first, share, 0, warp);
    Ring ring(shared);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        if (d >= own.count()) break;
        own.fetch(ring.first + d * SLOT, lane);
        cp_async_commit();
    }
    Portion<FORMAT1, RAGGED1> next(second, second.first, next_share, 0, warp);
    int ahead = min(next.count(), DEPTH);
    const auto fetch_next = [&](unsigned free) {
        if (ahead > 0) --ahead, next.fetch(free, lane);
    };
#pragma unroll 1
    for (int d = own.count(); d < DEPTH; ++d) {
        fetch_next(ring.first + d * SLOT);
        cp_async_commit();
    }
    const Finish finish{Destination(first, matrix, share, warp), Sharers(own.slice, warp)};
    const Finish next_finish{Destination(second, next_matrix, next_share, warp),
                             Sharers(next.slice, warp)};
    if (lane == 0) space.finishes[warp] = finish, next_space.finishes[warp] = next_finish;
    if (!late) begin();
    if (RANKS > 1 && warp == 0) outbox.open(peers, slot, exchange);

    // y_TN = partial_TN.sum(warps)
    stage_activations<TOKENS, false, is_f16(FORMAT0), PIECES0, true, ALIGNED_X, THREADS>(
        HeldRows<PIECES0, TOKENS>{pieces}, columns, own.slice.stages * Stage<FORMAT0>::COLUMNS,
        nullptr, 0.0f, space.x, space.inverse, space.scratch);
    own.multiply(ring, space.x, partials, warp, lane, fetch_next);
    __syncthreads();
    if (threadIdx.x == 0) launch.end();
    const WordRows y_words = {halves.of(number), tokens, second.columns};
    collect_tiles<FORMAT0>(
        first, share, 0, space, matrix, [&](const Destination& to, int, int output, float value) {
            const int row = output % TILE_ROWS, token = output / TILE_ROWS;
            const float above = __shfl_down_sync(~0u, value, 1);
            if (row % 2 == 0 && to.has(tokens, output))
                y_words.send(token, to.first_row + row, value * to.global_scale,
                             above * to.global_scale);
            to.store(tokens, output, value);
        });
    halves.clear_before(number, gridDim.x);

    // z_TN = partial_TN.sum(warps)
    stage_activations<TOKENS, false, is_f16(FORMAT1), PIECES1, HOLDS_SLICE1, true, THREADS>(
        y_words, second.columns, next.slice.stages * Stage<FORMAT1>::COLUMNS, nullptr, 0.0f,
        next_space.x, next_space.inverse, next_space.scratch);
    next.multiply(ring, next_space.x, partials, warp, lane, [](unsigned) {});
    cp_async_wait<0>();
    __syncthreads();
    collect_tiles<FORMAT1>(second, next_share, 0, next_space, next_matrix,
                           [&](const Destination& to, int, int output, float value) {
                               send_or_store(to, outbox, tokens, output, value);
                           });
}
