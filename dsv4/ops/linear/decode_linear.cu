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
// of a block), RANKS (above 1: y goes to the ranks as words, exchange.cuh).
#include "columns.cuh"
#include "exchange.cuh"
#include "weight_tile.cuh"

constexpr int SLOT = slot_bytes(FORMAT0, FORMAT1);
// MAX_MATRICES and MAX_SLICES as in decode_plan.py.
constexpr int MAX_MATRICES = 8;
static_assert(MAX_MATRICES <= WARP, "a warp has one in each lane");
constexpr int MAX_SLICES = 8;
constexpr int TILE_OUTPUTS = TILE_ROWS * TOKENS, THREADS = WARPS * WARP;

// Row tiles of one format, `tiles` of them (per group) for `clusters` clusters (per group).
struct Rows {
    const char *data, *scale;
    int tiles, clusters;
};

// x + token · row_stride + group · group_stride, [tokens, columns]. Clusters [0, groups ·
// first.clusters) share the tiles of `first` per group of rows; the other second.clusters those of
// `second`. scale_shift: log2 of the row tiles per row of FP8 block scales. `table` (or null): per
// matrix (first tile, tiles of `second` following those of `first`; rows; y offset in bytes per
// token; 1 for float32) with its global_scale; null: one matrix of groups · rows rows to y [tokens,
// groups · rows].
struct Product {
    const bf16* x;
    int row_stride, group_stride, tokens;
    const float* norm_weight;
    float eps;
    char* y;
    int columns, slice_columns;
    Rows first;
    int groups;
    Rows second;
    int scale_shift;
    const float* global_scale;
    const int4* table;
    int matrices, rows, float32_out;
    const int64* peers;
    int64 slot;
    int exchange;

    __device__ __forceinline__ int padded_columns() const { return (columns + 63) / 64 * 64; }
};

// What a cluster has of a product: tiles [begin, end) of one format.
struct Share {
    bool second;
    int group, begin, end;

    __device__ __forceinline__ Share(const Product& p, int cluster) {
        const int firsts = p.groups * p.first.clusters;
        second = cluster >= firsts;
        group = second ? 0 : cluster / p.first.clusters;
        const int member = second ? cluster - firsts : cluster % p.first.clusters;
        const int tiles = second ? p.second.tiles : p.first.tiles;
        const int members = second ? p.second.clusters : p.first.clusters;
        const int group_tile = p.table ? 0 : group * p.rows / TILE_ROWS;
        const int limit = p.table ? 1 << 30 : (p.groups * p.rows + TILE_ROWS - 1) / TILE_ROWS;
        // Below 2^32: a launch has at most a few hundred clusters.
        begin = group_tile + (unsigned)member * tiles / (unsigned)members;
        const int next = group_tile + (unsigned)(member + 1) * tiles / (unsigned)members;
        end = max(begin, min(limit, next));
    }

    __device__ __forceinline__ int tiles() const { return end - begin; }
};

// The matrices of a product, one in each of a warp's first lanes: its entry of the table and its
// global scale.
struct Matrices {
    int4 entry;
    float global_scale;

    // Constants only.
    __device__ __forceinline__ explicit Matrices(const Product& p) {
        const int lane = threadIdx.x % WARP;
        entry = make_int4(lane == 0 ? 0 : 1 << 30, p.groups * p.rows, 0, p.float32_out);
        global_scale = 1.0f;
        if (lane >= p.matrices) return;
        if (p.table) {
            const uint4 words = load_stream(p.table + lane);
            entry = make_int4(words.x, words.y, words.z, words.w);
        }
        if (p.global_scale) global_scale = fetch_constant(p.global_scale + lane);
    }
};

// Where the outputs of a tile go. Of its rows, [begin, end) exist.
struct Destination {
    char* matrix;
    int rows, first_row, begin, end, is_float;
    float global_scale;

    Destination() = default;

    // The whole warp.
    __device__ __forceinline__ Destination(const Product& p, const Matrices& matrices,
                                           const Share& share, int tile) {
        const int listed = share.begin + tile + (share.second ? p.first.tiles : 0);
        const int m = __popc(__ballot_sync(~0u, listed >= matrices.entry.x)) - 1;
        rows = __shfl_sync(~0u, matrices.entry.y, m);
        first_row = (listed - __shfl_sync(~0u, matrices.entry.x, m)) * TILE_ROWS;
        matrix = p.y + (int64)__shfl_sync(~0u, matrices.entry.z, m) * p.tokens;
        is_float = __shfl_sync(~0u, matrices.entry.w, m);
        global_scale = __shfl_sync(~0u, matrices.global_scale, m);
        const int group_row = p.table ? 0 : share.group * p.rows;
        begin = group_row - first_row;
        end = (p.table ? rows : min(rows, group_row + p.rows)) - first_row;
    }

    // `output`: 16 · token + row.
    __device__ __forceinline__ void store(const Outbox& outbox, int tokens, int output,
                                          float value) const {
        const int row = output % TILE_ROWS, token = output / TILE_ROWS;
        if (token >= tokens || row < begin || row >= end) return;
        // y_TN = (global_scale * y_TN).to(out_dtype)
        value *= global_scale;
        const int64 at = (int64)token * rows + first_row + row;
        if constexpr (RANKS > 1) return outbox.push(at, value);
        if (is_float) reinterpret_cast<float*>(matrix)[at] = value;
        else reinterpret_cast<bf16*>(matrix)[at] = __float2bfloat16(value);
    }
};

// How K is cut: slice s begins at column s · slice_columns and has `stages` stages, of which each
// warp takes `share` of the (tile, stage) list.
template <int F>
struct Slice {
    int begin, columns, stages, share;
    __device__ __forceinline__ Slice(const Product& p, int index, int tiles) {
        begin = index * p.slice_columns;
        columns = min(p.slice_columns, p.columns - begin);
        stages = (min(p.slice_columns, p.padded_columns() - begin) + Stage<F>::COLUMNS - 1) /
                 Stage<F>::COLUMNS;
        share = (tiles * stages + WARPS - 1) / WARPS;
    }
};

// The warps, first to last, that share a tile of a slice.
struct Sharers {
    int first, last;

    Sharers() = default;

    template <int F>
    __device__ __forceinline__ Sharers(const Slice<F>& slice, int tile)
        : first(tile * slice.stages / slice.share),
          last(((tile + 1) * slice.stages - 1) / slice.share) {}
};

// What a warp needs to know to finish its first tile. It lies in shared memory: so all of it is
// computed before the wait, and none of it takes registers behind it.
struct Finish {
    Destination destination;
    Sharers sharers;
};

// Blocks begin the columns of their tiles at different stages: where K is a power of two, blocks in
// step would otherwise keep reading the same few memory channels.
__device__ __forceinline__ int first_turn(int stages) { return blockIdx.x * 5 % stages; }
// (a + b) % stages for a and b below `stages`.
__device__ __forceinline__ int add_turns(int a, int b, int stages) {
    return a + b < stages ? a + b : a + b - stages;
}

// The next stage a warp fetches.
template <int F>
struct Cursor {
    static constexpr int SCALE_STEP = F == FP8 ? 4 : STAGE_LOADS * Stage<F>::CHUNK_SCALE;
    const char *data, *scale;
    int tile, stage, left, stages, loads, scale_blocks, tile_mask, loads_left;

    // From the `done`-th of the `stages` stages of `tile` on; a tile's stages are first_stage +
    // (first_turn + 0, 1, …) % stages. padded_columns is K as stored, a multiple of 64.
    __device__ __forceinline__ Cursor(const Rows& rows, int tile, int done, int stages,
                                      int first_stage, int padded_columns, int scale_shift)
        : tile(tile), left(stages - done), stages(stages), tile_mask((1 << scale_shift) - 1) {
        loads = padded_columns / Stage<F>::CHUNK;
        scale_blocks = (padded_columns + 127) / 128;
        stage = add_turns(first_turn(stages), done, stages);
        const int at = first_stage + stage;
        data = rows.data + ((int64)tile * loads + at * STAGE_LOADS) * LOAD_BYTES;
        if (F == FP8) scale = rows.scale + 4 * ((int64)(tile >> scale_shift) * scale_blocks + at);
        else scale = rows.scale + ((int64)tile * loads + at * STAGE_LOADS) * Stage<F>::CHUNK_SCALE;
        loads_left = loads - first_stage * STAGE_LOADS;
    }

    __device__ __forceinline__ void fetch(unsigned slot, int lane) const {
        stage_fetch<F, RAGGED_K>(slot, data, scale, lane, loads_left - stage * STAGE_LOADS);
    }

    __device__ __forceinline__ void advance() {
        data += STAGE_DATA;
        scale += SCALE_STEP;
        if (++stage == stages) {
            stage = 0;
            data -= stages * STAGE_DATA;
            scale -= stages * SCALE_STEP;
        }
        if (--left == 0) {
            left = stages;
            data += loads * LOAD_BYTES;
            // The next tile shares the FP8 scales of this one unless it begins another row of
            // blocks.
            if (F == FP8) scale += (++tile & tile_mask) == 0 ? 4 * scale_blocks : 0;
            else scale += loads * Stage<F>::CHUNK_SCALE;
        }
    }
};

// Where a block works: the warps' rings, the activations of a slice, the partial tiles, the way
// out.
struct Workspace {
    char *rings, *x;
    float *partials, *inverse, *scratch;
    Outbox* outbox;
    Finish* finishes;
};

// A warp's partial tile: [token][row].
__device__ __forceinline__ void store_partial(float* partial, int lane,
                                              const float (&acc)[accumulators(TOKENS)]) {
    const int row = lane / 4, token = lane % 4;
    if constexpr (TOKENS > 4) {
        float* at = partial + 2 * token * TILE_ROWS + row;
        const bool even = 2 * token < TOKENS, odd = 2 * token + 1 < TOKENS;
        if (even) at[0] = acc[0];
        if (odd) at[TILE_ROWS] = acc[1];
        if (even) at[8] = acc[2];
        if (odd) at[TILE_ROWS + 8] = acc[3];
    } else if (token < TOKENS) {
        float* at = partial + token * TILE_ROWS + row;
        at[0] = acc[0], at[8] = acc[1];
    }
}

// What one block has of its tiles: partial tiles, slice after slice of its own, entry (tile + warp)
// of a slice being what a warp has of a tile.
template <int F>
__device__ __forceinline__ void multiply_tiles(const Product& p, const Rows& rows,
                                               const Share& share, int rank,
                                               const Workspace& space,
                                               const Matrices& matrices) {
    const int lane = threadIdx.x % WARP;
    const int warp = warp_index();
    const int tiles = share.tiles();
    const bf16* x = p.x + (int64)share.group * p.group_stride;
    const unsigned x_lane = shared_address(space.x) + lane_offset<TOKENS>(lane);
    const unsigned ring = shared_address(space.rings) + own_warp() * (DEPTH * SLOT);
    for (int turn = 0; turn < TURNS; ++turn) {
        const Slice<F> slice(p, rank + turn * CLUSTER, tiles);
        const int total = tiles * slice.stages;
        const int first = min(warp * slice.share, total);
        const int last = min(first + slice.share, total);
        int tile = first / slice.stages, stage = first % slice.stages;
        Cursor<F> cursor(rows, share.begin + tile, stage, slice.stages,
                         slice.begin / Stage<F>::COLUMNS, p.padded_columns(), p.scale_shift);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (first + d < last) {
                cursor.fetch(ring + d * SLOT, lane);
                cursor.advance();
            }
            cp_async_commit();
        }
        if (turn == 0) {
            const int own = CLUSTER > 1 ? warp * CLUSTER + rank : warp;
            const Finish finish{Destination(p, matrices, share, own), Sharers(slice, warp)};
            if (lane == 0) space.finishes[warp] = finish;
            pdl_wait();
            if (RANKS > 1 && warp == 0) space.outbox->open(p.peers, p.slot, p.exchange);
        } else {
            __syncthreads();
        }
        // x_TK = rms_norm(x_TK, norm_weight) if FUSED_NORM; f16 rows also get a power of two
        stage_activations<TOKENS, FUSED_NORM, is_f16(F), PIECES, HOLDS_SLICE, ALIGNED_X, THREADS>(
            x + slice.begin, p.row_stride, p.tokens, slice.columns,
            slice.stages * Stage<F>::COLUMNS, p.norm_weight, p.eps, space.x,
            space.inverse + turn * TOKENS, space.scratch);
        float* partials = space.partials + turn * (tiles + WARPS - 1) * TILE_OUTPUTS;
        float acc[accumulators(TOKENS)] = {};
        constexpr unsigned X_BYTES = activation_bytes(TOKENS, Stage<F>::COLUMNS);
        const unsigned x_end = x_lane + slice.stages * X_BYTES;
        unsigned slot = ring;
        unsigned x_stage =
            x_lane + add_turns(first_turn(slice.stages), stage, slice.stages) * X_BYTES;
#pragma unroll 1
        for (int i = first; i < last; ++i) {
            cp_async_wait<DEPTH - 1>();
            __syncwarp();
            // partial_TN += x_TK[:, stage] @ weight_NK[tile, stage].T
            stage_multiply<F, TOKENS>(slot, x_stage, lane, acc);
            __syncwarp();
            if (i + DEPTH < last) {
                cursor.fetch(slot, lane);
                cursor.advance();
            }
            cp_async_commit();
            slot = slot == ring + (DEPTH - 1) * SLOT ? ring : slot + SLOT;
            x_stage = x_stage + X_BYTES == x_end ? x_lane : x_stage + X_BYTES;
            if (++stage == slice.stages || i + 1 == last) {
                store_partial(partials + (tile + warp) * TILE_OUTPUTS, lane, acc);
#pragma unroll
                for (int j = 0; j < accumulators(TOKENS); ++j) acc[j] = 0.0f;
                ++tile;
                stage = 0;
            }
        }
    }
    cp_async_wait<0>();
    __syncthreads();
}

// Calls emit(destination, tile, output, sum) for every output = 16 · token + row of every tile: the
// sum over the block's slices and warps, in that order. A warp takes a tile.
template <int F, typename Emit>
__device__ __forceinline__ void collect_tiles(const Product& p, const Share& share, int rank,
                                              const Workspace& space, const Matrices& matrices,
                                              Emit emit) {
    const int lane = threadIdx.x % WARP, tiles = share.tiles();
    const int warp = warp_index();
    Finish finish = space.finishes[warp];
    for (int tile = warp; tile < tiles; tile += WARPS) {
        if (CLUSTER == 1 && tile >= WARPS)
            finish.destination = Destination(p, matrices, share, tile);
        float sums[(TILE_OUTPUTS + WARP - 1) / WARP] = {};
        for (int turn = 0; turn < TURNS; ++turn) {
            const Slice<F> slice(p, rank + turn * CLUSTER, tiles);
            const Sharers sharers =
                turn == 0 && tile < WARPS ? finish.sharers : Sharers(slice, tile);
            const float* entries =
                space.partials + (turn * (tiles + WARPS - 1) + tile) * TILE_OUTPUTS;
#pragma unroll
            for (int j = 0; j < (TILE_OUTPUTS + WARP - 1) / WARP; ++j) {
                const int output = lane + j * WARP;
                if (output >= TILE_OUTPUTS) break;
                float values[WARPS], sum = 0.0f;
#pragma unroll
                for (int i = 0; i < WARPS; ++i) {
                    const int warp = sharers.first + i;
                    values[i] =
                        warp <= sharers.last ? entries[warp * TILE_OUTPUTS + output] : 0.0f;
                }
#pragma unroll
                for (int i = 0; i < WARPS; ++i) sum += values[i];
                // y_TN = partial_TN.sum(warps), less the power of two of x_TK
                sums[j] += sum * space.inverse[turn * TOKENS + output / TILE_ROWS];
            }
        }
#pragma unroll
        for (int j = 0; j < (TILE_OUTPUTS + WARP - 1) / WARP; ++j) {
            const int output = lane + j * WARP;
            if (output < TILE_OUTPUTS)
                emit(finish.destination, tile, output, sums[j] * format_factor<F>());
        }
    }
}

__device__ __forceinline__ void multiply(const Product& p, const Share& share, int rank,
                                         const Workspace& space, const Matrices& matrices) {
    if constexpr (FORMAT1 >= 0) {
        if (share.second)
            return multiply_tiles<FORMAT1>(p, p.second, share, rank, space, matrices);
    }
    multiply_tiles<FORMAT0>(p, p.first, share, rank, space, matrices);
}

template <typename Emit>
__device__ __forceinline__ void collect(const Product& p, const Share& share, int rank,
                                        const Workspace& space, const Matrices& matrices,
                                        Emit emit) {
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
                  int exchange) {
    pdl_launch();
    if (knows_tokens(TOKENS)) tokens = TOKENS;
    extern __shared__ __align__(SLOT_LINE_BYTES) char shared[];
    __shared__ float inverse[MAX_SLICES * TOKENS], scratch[2 * TOKENS * WARP];
    __shared__ Outbox outbox;
    __shared__ Finish finishes[WARPS];
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
                             {data0, scale0, tiles0, clusters0},
                             groups,
                             {data1, scale1, tiles1, clusters1},
                             scale_shift,
                             global_scale,
                             table,
                             matrices,
                             rows,
                             float32_out,
                             peers,
                             slot,
                             exchange};
    char* x_shared = shared + WARPS * DEPTH * SLOT;
    const Workspace space = {shared, x_shared, reinterpret_cast<float*>(x_shared + x_bytes),
                             inverse, scratch, &outbox, finishes};
    const Matrices listed(product);
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    const Share share(product, blockIdx.x / CLUSTER);
    assert_shared_memory(x_shared - shared + x_bytes + partial_bytes +
                         received_bytes(share.tiles()));
    const int tiles = share.tiles();
    const int inbox_bytes =
        (CLUSTER - 1) * ((tiles + CLUSTER - 1 - rank) / CLUSTER) * TILE_OUTPUTS * 4;
    if (CLUSTER > 1) {
        cluster_start(&inbox, 1);
        if (threadIdx.x == 0 && inbox_bytes > 0) expect_mail(&inbox, inbox_bytes);
    }
    if (FUSED_NORM) {
        for (int i = threadIdx.x * 32; i < columns; i += THREADS * 32) prefetch_l2(norm_weight + i);
    }
    // y_TN = F.linear(x_TK, dequantize(weight_NK)), as partial tiles
    multiply(product, share, rank, space, listed);
    const int warp = warp_index();
    if constexpr (CLUSTER == 1) {
        const auto store = [&](const Destination& to, int, int output, float value) {
            to.store(outbox, tokens, output, value);
        };
        collect(product, share, rank, space, listed, store);
    } else {
        // Tile t is finished by the block of rank t % CLUSTER: [t / CLUSTER][rank of the
        // sender][output].
        float* received = reinterpret_cast<float*>(x_shared + x_bytes + partial_bytes);
        const auto pass_on = [&](const Destination&, int tile, int output, float value) {
            float* slot = received + ((tile / CLUSTER) * CLUSTER + rank) * TILE_OUTPUTS + output;
            if (tile % CLUSTER == rank) *slot = value;
            else send(slot, &inbox, tile % CLUSTER, value);
        };
        cluster_started();
        collect(product, share, rank, space, listed, pass_on);
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
                destination.store(outbox, tokens, output, sum);
            }
        }
    }
}
