// y = x · Wᵀ for up to 8 tokens in one launch: W is a list of matrices of one or two formats, or
// the groups of one matrix.
//
// Every cluster (of one block where the activations are few) owns whole row tiles of one format;
// its blocks share K in slices. A block's (tile, stage) list is cut into equal pieces, one per
// warp, whose partial tiles meet in shared memory in a fixed order, and then those of the cluster's
// blocks. Each warp streams its weights through a private ring, which it fills before it waits for
// the kernel before.
//
// Defines: FORMAT0, FORMAT1 (-1: none), TOKENS (1 to 8, as many as the launch has), FUSED_NORM,
// RAGGED_K (K is no multiple of a stage), WARPS, PIECES, HOLDS_SLICE and ALIGNED_X (HELD, WHOLE and
// ALIGNED of stage_activations), DEPTH (stages of a warp's ring), CLUSTER (blocks), TURNS (slices
// of a block), LATER (there are later_tiles: of one format, with CLUSTER and TURNS 1), RANKS (above
// 1: y goes to the ranks as words, exchange.cuh), SHARES (the rank has some tiles of a list, whose
// words lie tile by tile), GATHERS (x comes as such words, and with it all that the list gives:
// gathered_rows.cuh).
#include "gathered_rows.cuh"

static_assert(!LATER || (FORMAT1 < 0 && CLUSTER == 1 && TURNS == 1), "blocks have whole tiles");
static_assert(!GATHERS || (CLUSTER == 1 && TURNS == 1), "blocks have all of K");
static_assert(!GATHERS || (FUSED_NORM && HOLDS_SLICE), "x is read before it is written anew");

// Tiles of a cluster, and where a block works on them.
struct Work {
    Share share;
    Workspace space;
};

// What one block has of its tiles: partial tiles, slice after slice of its own. With LATER a warp's
// ring goes on with those of `later`.
template <int F>
__device__ __forceinline__ void multiply_tiles(const Product& p, const Rows& rows, const Work& work,
                                               const Work& later, int rank,
                                               const Matrices& matrices, GatheredRows& gathered) {
    const Share& share = work.share;
    const Workspace& space = work.space;
    const int lane = threadIdx.x % WARP;
    const int warp = warp_index();
    const bf16* x = p.x + (int64)share.group * p.group_stride;
    for (int turn = 0; turn < TURNS; ++turn) {
        Portion<F, RAGGED_K> own(p, rows, share, rank + turn * CLUSTER, warp);
        const Slice<F>& slice = own.slice;
        Ring ring(space.rings);
        Portion<F, RAGGED_K> next(p, rows, later.share, 0, warp);
        int ahead = LATER ? min(next.count(), DEPTH) : 0;
        const auto fetch_next = [&](unsigned free) {
            if (LATER && ahead > 0) --ahead, next.fetch(free, lane);
        };
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (d < own.count()) own.fetch(ring.first + d * SLOT, lane);
            else fetch_next(ring.first + d * SLOT);
            cp_async_commit();
        }
        if (turn == 0) {
            const int finished = CLUSTER > 1 ? warp * CLUSTER + rank : warp;
            const Finish finish{Destination(p, matrices, share, finished), Sharers(slice, warp)};
            if (lane == 0) space.finishes[warp] = finish;
            if (LATER) {
                const Finish next_finish{Destination(p, matrices, later.share, warp),
                                         Sharers(next.slice, warp)};
                if (lane == 0) later.space.finishes[warp] = next_finish;
            }
            pdl_wait();
            if (FUSED_NORM) pdl_launch();
            gathered.open();
            if (PUSHES && warp == 0) space.outbox->open(p.peers, p.slot, p.exchange);
        } else {
            __syncthreads();
        }
        // x_TK = rms_norm(x_TK, norm_weight) if FUSED_NORM; f16 rows also get a power of two
        const auto stage = [&](const auto& rows) {
            stage_activations<TOKENS, FUSED_NORM, is_f16(F), PIECES, HOLDS_SLICE, ALIGNED_X,
                              THREADS>(rows, slice.columns, slice.stages * Stage<F>::COLUMNS,
                                       p.norm_weight, p.eps, space.x,
                                       space.inverse + turn * TOKENS, space.scratch);
        };
        if constexpr (GATHERS) {
            // Where they lie until they are normalised.
            bf16* first = reinterpret_cast<bf16*>(space.x);
            const int stride = (slice.columns + 7) / 8 * 8;
            gathered.find_first(first, slice.columns, stride);
            stage(FirstProduct{first, stride});
        } else {
            stage(StoredRows<ALIGNED_X>{x + slice.begin, p.row_stride, p.tokens, slice.columns});
        }
        float* partials = space.partials + turn * (share.tiles() + WARPS - 1) * TILE_OUTPUTS;
        own.multiply(ring, space.x, partials, warp, lane, fetch_next);
        if (LATER)
            next.multiply(ring, space.x, later.space.partials, warp, lane, [](unsigned) {});
    }
    cp_async_wait<0>();
    __syncthreads();
}

__device__ __forceinline__ void multiply(const Product& p, const Work& work, const Work& later,
                                         int rank, const Matrices& matrices,
                                         GatheredRows& gathered) {
    if constexpr (FORMAT1 >= 0) {
        if (work.share.second)
            return multiply_tiles<FORMAT1>(p, p.second, work, later, rank, matrices, gathered);
    }
    multiply_tiles<FORMAT0>(p, p.first, work, later, rank, matrices, gathered);
}

template <typename Emit>
__device__ __forceinline__ void collect(const Product& p, const Work& work, int rank,
                                        const Matrices& matrices, Emit emit) {
    const auto& [share, space] = work;
    if constexpr (FORMAT1 >= 0) {
        if (share.second) return collect_tiles<FORMAT1>(p, share, rank, space, matrices, emit);
    }
    collect_tiles<FORMAT0>(p, share, rank, space, matrices, emit);
}

// Bytes of the sums that a block of a cluster may get for its share of `tiles`.
__device__ __forceinline__ int received_bytes(int tiles) {
    return CLUSTER > 1 ? (tiles + CLUSTER - 1) / CLUSTER * CLUSTER * TILE_OUTPUTS * 4 : 0;
}

// See Product. Shared memory: rings, x_bytes for the activations of a slice, the partial tiles,
// with CLUSTER > 1 the sums received. Rings begin on a line of shared memory, so that a line of
// weights is copied into one line of a slot, not into parts of two.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_linear(const bf16* x, int row_stride, int group_stride, int tokens,
                  const float* norm_weight, float eps, char* y, int columns, int slice_columns,
                  const char* data0, const char* scale0, int tiles0, int clusters0, int groups,
                  const char* data1, const char* scale1, int tiles1, int clusters1, int scale_shift,
                  const float* global_scale, const int4* table, int matrices, int rows,
                  int float32_out, int x_bytes, int partial_bytes, const int64* peers, int64 slot,
                  int exchange, int later_tiles, int first_tile0, int first_tile1,
                  int listed_tiles, const int4* gathered_table, int gathered_matrices,
                  int gathered_tiles0, int gathered_tiles1, int x_tile, char* gathered_memory,
                  int64 rank_words) {
    // Query rows settle what came before them: the kernel behind them is small, and starts no
    // sooner than their blocks end.
    if (!FUSED_NORM) pdl_launch();
    if (knows_tokens(TOKENS)) tokens = TOKENS;
    extern __shared__ __align__(SLOT_LINE_BYTES) char shared[];
    __shared__ float inverse[MAX_SLICES * TOKENS], scratch[2 * TOKENS * WARP];
    __shared__ Outbox outbox;
    __shared__ Finish finishes[(1 + LATER) * WARPS];
    __shared__ uint64 inbox;
    const Product product = {x,
                             row_stride,
                             group_stride,
                             tokens,
                             norm_weight,
                             eps,
                             y,
                             columns,
                             slice_columns,
                             {data0, scale0, tiles0, clusters0, first_tile0},
                             groups,
                             {data1, scale1, tiles1, clusters1, first_tile1},
                             scale_shift,
                             global_scale,
                             table,
                             matrices,
                             rows,
                             float32_out,
                             peers,
                             slot,
                             exchange,
                             later_tiles,
                             listed_tiles};
    char* x_shared = shared + WARPS * DEPTH * SLOT;
    const Matrices listed(product);
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    const Share share(product, blockIdx.x / CLUSTER);
    const int tiles = share.tiles();
    assert_shared_memory(x_shared - shared + x_bytes + partial_bytes + received_bytes(tiles));
    float* partials = reinterpret_cast<float*>(x_shared + x_bytes);
    const Work work = {share, {shared, x_shared, partials, inverse, scratch, &outbox, finishes}};
    Work later = {share.later(product, blockIdx.x), work.space};
    later.space.partials += (tiles + WARPS - 1) * TILE_OUTPUTS;
    later.space.finishes += WARPS;
    const int inbox_bytes =
        (CLUSTER - 1) * ((tiles + CLUSTER - 1 - rank) / CLUSTER) * TILE_OUTPUTS * 4;
    if (CLUSTER > 1) {
        cluster_start(&inbox, 1);
        if (threadIdx.x == 0 && inbox_bytes > 0) expect_mail(&inbox, inbox_bytes);
    }
    if (FUSED_NORM) {
        for (int i = threadIdx.x * 32; i < columns; i += THREADS * 32) prefetch_l2(norm_weight + i);
    }
    __shared__ int4 gathered_entries[GATHERS ? MAX_MATRICES : 1];
    if (GATHERS && threadIdx.x < gathered_matrices)
        gathered_entries[threadIdx.x] = gathered_table[threadIdx.x];
    GatheredRows gathered = {slot,
                             rank_words,
                             exchange,
                             gathered_entries,
                             gathered_matrices,
                             gathered_tiles0,
                             gathered_tiles1,
                             x_tile,
                             gathered_memory};
    gathered.reach(peers);
    // y_TN = F.linear(x_TK, dequantize(weight_NK)), as partial tiles
    multiply(product, work, later, rank, listed, gathered);
    const int warp = warp_index();
    if constexpr (CLUSTER == 1) {
        const auto emit = [&](const Destination& to, int, int output, float value) {
            send_or_store(to, outbox, tokens, output, value);
        };
        collect(product, work, rank, listed, emit);
        if (LATER) collect(product, later, rank, listed, emit);
        if (GATHERS) gathered.store();
    } else {
        // Tile t is finished by the block of rank t % CLUSTER: [t / CLUSTER][rank of the
        // sender][output].
        float* received = reinterpret_cast<float*>(x_shared + x_bytes + partial_bytes);
        const auto pass_on = [&](const Destination&, int tile, int output, float value) {
            if (output >= TILE_OUTPUTS) return;
            float* slot = received + ((tile / CLUSTER) * CLUSTER + rank) * TILE_OUTPUTS + output;
            if (tile % CLUSTER == rank) *slot = value;
            else send(slot, &inbox, tile % CLUSTER, value);
        };
        cluster_started();
        collect(product, work, rank, listed, pass_on);
        if (inbox_bytes > 0) wait_mail(&inbox, 0);
        __syncthreads();
        Destination destination = finishes[warp].destination;
        for (int tile = warp * CLUSTER + rank; tile < tiles; tile += WARPS * CLUSTER) {
            if (tile >= WARPS * CLUSTER) destination = Destination(product, listed, share, tile);
            for (int output = threadIdx.x % WARP; output < TILE_OUTPUTS; output += WARP) {
                float sum = 0.0f;
#pragma unroll
                for (int sender = 0; sender < CLUSTER; ++sender)
                    // y_TN = received_TN.sum(senders)
                    sum += received[((tile / CLUSTER) * CLUSTER + sender) * TILE_OUTPUTS + output];
                send_or_store(destination, outbox, tokens, output, sum);
            }
        }
    }
}
