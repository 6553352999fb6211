// What the decode kernels of linear layers share: which row tiles a block has, where their outputs
// go, how K is cut, which stages a warp fetches, and how the sums of the warps meet.
//
// Defines: FORMAT0, FORMAT1, TOKENS, WARPS, DEPTH, CLUSTER, TURNS, RANKS, SHARES and GATHERS of
// decode_linear.cu.
#pragma once
#include "columns.cuh"
#include "exchange.cuh"
#include "weight_tile.cuh"

#ifndef SHARES
#define SHARES 0
#endif
#ifndef GATHERS
#define GATHERS 0
#endif

// MAX_MATRICES and MAX_SLICES as in decode_plan.py.
constexpr int MAX_MATRICES = 8;
static_assert(MAX_MATRICES <= WARP, "a warp has one in each lane");
constexpr int MAX_SLICES = 8;
constexpr int TILE_OUTPUTS = TILE_ROWS * TOKENS, THREADS = WARPS * WARP;
// Whether the results go to the ranks instead of to y.
constexpr bool PUSHES = RANKS > 1 && !GATHERS;
// Bytes of a slot of the warps' rings.
constexpr int SLOT = slot_bytes(FORMAT0, FORMAT1);

// Row tiles of one format: `tiles` of them (per group) for `clusters` clusters (per group), from
// `begin` on.
struct Rows {
    const char *data, *scale;
    int tiles, clusters, begin;
};

// x + token · row_stride + group · group_stride, [tokens, columns]. Clusters [0, groups ·
// first.clusters) share the tiles of `first` per group of rows; the other second.clusters those of
// `second`. scale_shift: log2 of the row tiles per row of FP8 block scales. `table` (or null): per
// matrix (first tile, tiles of `second` following those of `first`; rows; y offset in bytes per
// token; 1 for float32) with its global_scale; null: one matrix of groups · rows rows to y [tokens,
// groups · rows]. `later_tiles` of a list follow those of `first` and are dealt to the same
// clusters: steps that leave them out compute the others in the same way. listed_tiles: how many
// tiles of the first format `table` has, also where `first` has a rank's share of them.
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
    int later_tiles, listed_tiles;

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
        const int first = group_tile + (second ? p.second.begin : p.first.begin);
        begin = first + (unsigned)member * tiles / (unsigned)members;
        const int next = first + (unsigned)(member + 1) * tiles / (unsigned)members;
        end = max(begin, min(limit, next));
    }

    // What this cluster has of p.later_tiles.
    __device__ __forceinline__ Share later(const Product& p, int cluster) const {
        Share share = *this;
        const unsigned tiles = p.later_tiles, members = p.first.clusters;
        share.begin = p.first.tiles + cluster * tiles / members;
        share.end = p.first.tiles + (cluster + 1) * tiles / members;
        return share;
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
        const int listed = share.begin + tile + (share.second ? p.listed_tiles : 0);
        const int m = __popc(__ballot_sync(~0u, listed >= matrices.entry.x)) - 1;
        rows = __shfl_sync(~0u, matrices.entry.y, m);
        first_row = (listed - __shfl_sync(~0u, matrices.entry.x, m)) * TILE_ROWS;
        matrix = p.y + (int64)__shfl_sync(~0u, matrices.entry.z, m) * p.tokens;
        is_float = __shfl_sync(~0u, matrices.entry.w, m);
        global_scale = __shfl_sync(~0u, matrices.global_scale, m);
        const int group_row = p.table ? 0 : share.group * p.rows;
        begin = group_row - first_row;
        end = (p.table ? rows : min(rows, group_row + p.rows)) - first_row;
        if constexpr (SHARES) {
            // Words of a rank's tile lie behind those of its other ones.
            first_row = (share.begin + tile - (share.second ? p.second.begin - p.first.tiles
                                                            : p.first.begin)) *
                        TILE_ROWS;
            begin = 0, end = TILE_ROWS;
        }
    }

    // Whether there is such an output; `output`: 16 · token + row.
    __device__ __forceinline__ bool has(int tokens, int output) const {
        const int row = output % TILE_ROWS;
        return output / TILE_ROWS < tokens && row >= begin && row < end;
    }

    // y_TN = (global_scale * y_TN).to(out_dtype)
    __device__ __forceinline__ void store(int tokens, int output, float value) const {
        if (!has(tokens, output)) return;
        value *= global_scale;
        if (is_float) reinterpret_cast<float*>(matrix)[at(output)] = value;
        else reinterpret_cast<bf16*>(matrix)[at(output)] = __float2bfloat16(value);
    }

    __device__ __forceinline__ void push(const Outbox& outbox, int tokens, int output,
                                         float value) const {
        if (!has(tokens, output)) return;
        outbox.push(SHARES ? (int64)first_row * tokens + output : at(output), value * global_scale);
    }

   private:
    __device__ __forceinline__ int64 at(int output) const {
        return (int64)(output / TILE_ROWS) * rows + first_row + output % TILE_ROWS;
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
template <int F, bool RAGGED>
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
        stage_fetch<F, RAGGED>(slot, data, scale, lane, loads_left - stage * STAGE_LOADS);
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

// The warp's ring. `slot`: of the stage that is multiplied next.
struct Ring {
    unsigned first, slot;

    __device__ __forceinline__ explicit Ring(const char* rings)
        : first(shared_address(rings) + own_warp() * (DEPTH * SLOT)), slot(first) {}

    __device__ __forceinline__ void advance() {
        slot = slot == first + (DEPTH - 1) * SLOT ? first : slot + SLOT;
    }
};

// A warp's stages of a slice of a product: `first` to `last` of the block's list.
template <int F, bool RAGGED>
struct Portion {
    Slice<F> slice;
    int first, last, tile, stage;
    Cursor<F, RAGGED> cursor;

    __device__ __forceinline__ Portion(const Product& p, const Rows& rows, const Share& share,
                                       int index, int warp)
        : slice(p, index, share.tiles()),
          first(min(warp * slice.share, share.tiles() * slice.stages)),
          last(min(first + slice.share, share.tiles() * slice.stages)),
          tile(first / slice.stages),
          stage(first % slice.stages),
          cursor(rows, share.begin + tile, stage, slice.stages, slice.begin / Stage<F>::COLUMNS,
                 p.padded_columns(), p.scale_shift) {}

    __device__ __forceinline__ int count() const { return last - first; }

    // The next stage, on its way to a slot that is free.
    __device__ __forceinline__ void fetch(unsigned slot, int lane) {
        cursor.fetch(slot, lane);
        cursor.advance();
    }

    // The partial tiles, entry (tile + warp) being what a warp has of a tile. The first DEPTH
    // stages have been fetched; each is a group of copies. staged: the activations. follow(slot)
    // fetches what comes behind the last stage.
    template <typename Follow>
    __device__ __forceinline__ void multiply(Ring& ring, const char* staged, float* partials,
                                             int warp, int lane, const Follow& follow) {
        constexpr unsigned X_BYTES = activation_bytes(TOKENS, Stage<F>::COLUMNS);
        const unsigned x = shared_address(staged) + lane_offset<TOKENS>(lane);
        const unsigned x_end = x + slice.stages * X_BYTES;
        unsigned x_stage = x + add_turns(first_turn(slice.stages), stage, slice.stages) * X_BYTES;
        float acc[accumulators(TOKENS)] = {};
#pragma unroll 1
        for (int i = first; i < last; ++i) {
            cp_async_wait<DEPTH - 1>();
            __syncwarp();
            // partial_TN += x_TK[:, stage] @ weight_NK[tile, stage].T
            stage_multiply<F, TOKENS>(ring.slot, x_stage, lane, acc);
            __syncwarp();
            if (i + DEPTH < last) fetch(ring.slot, lane);
            else follow(ring.slot);
            cp_async_commit();
            ring.advance();
            x_stage = x_stage + X_BYTES == x_end ? x : x_stage + X_BYTES;
            if (++stage == slice.stages || i + 1 == last) {
                store_partial(partials + (tile + warp) * TILE_OUTPUTS, lane, acc);
#pragma unroll
                for (int j = 0; j < accumulators(TOKENS); ++j) acc[j] = 0.0f;
                ++tile;
                stage = 0;
            }
        }
    }
};

// Calls emit(destination, tile, output, sum) for every output = 16 · token + row of every tile: the
// sum over the block's slices and warps, in that order. A warp takes a tile, and all of its lanes
// call, those without an output too: it is TILE_OUTPUTS or more.
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
            emit(finish.destination, tile, lane + j * WARP, sums[j] * format_factor<F>());
        }
    }
}

// To all ranks, or to y.
__device__ __forceinline__ void send_or_store(const Destination& to, const Outbox& outbox,
                                              int tokens, int output, float value) {
    if constexpr (PUSHES) to.push(outbox, tokens, output, value);
    else to.store(tokens, output, value);
}
