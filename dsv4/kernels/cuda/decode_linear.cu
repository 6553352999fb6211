// y = x · Wᵀ for up to 8 tokens: one launch for a list of matrices of one or two formats, or for the groups of one matrix.
//
// Every cluster (of one block where the activations are few) owns whole row tiles of one format; its blocks share K in
// slices. A block's (tile, stage) list is cut into equal pieces, one per warp, whose partial tiles meet in shared memory
// in a fixed order, and then those of the cluster's blocks. Each warp streams its weights through a private ring that is
// filled before the wait for the kernel before; one more warp brings what follows into the L2 cache during that wait.
//
// Defines: FORMAT0, FORMAT1 (-1: none), PADDED_TOKENS (1, 2, 4, 8), FUSED_NORM, RAGGED_K (K is no multiple of a stage),
// WARPS, DEPTH (stages of a warp's ring), MIN_BLOCKS (per SM, which bounds the registers), PREFETCH_MB (what one launch may
// bring into the L2 cache while it waits for the kernel before), CLUSTER (blocks), ROTATE.
#include "weight_tile.cuh"

constexpr int TP = PADDED_TOKENS, MAX_MATRICES = 8, MAX_SLICES = 8;
constexpr __host__ __device__ int cmax(int a, int b) { return a > b ? a : b; }
constexpr __host__ __device__ int slot_bytes(int format) {
    return format < 0 ? 0 : format == NVFP4 ? Stage<NVFP4>::BYTES : format == MXFP4 ? Stage<MXFP4>::BYTES
         : format == FP8 ? Stage<FP8>::BYTES : Stage<BF16>::BYTES;
}
constexpr int SLOT = cmax(slot_bytes(FORMAT0), slot_bytes(FORMAT1));
constexpr int TILE_OUTPUTS = TILE_ROWS * TP, THREADS = (WARPS + (PREFETCH_MB > 0)) * WARP;

#ifdef TIMELINE
#define STAMP(i) do { if (threadIdx.x == 0) { unsigned long long t_; asm volatile("mov.u64 %0, %%clock64;" : "=l"(t_)); stamps[i] = t_; } } while (0)
__shared__ unsigned long long stamps[8];
#else
#define STAMP(i)
#endif

struct Arguments {
    const bf16* x;
    int row_stride, tokens, columns, slice_columns;
    const float* norm_weight;
    float eps;
};

// Blocks begin the columns of their tiles at different stages: where K is a power of two, blocks in step would otherwise
// keep reading the same few memory channels.
__device__ __forceinline__ int first_turn(int stages) { return ROTATE ? blockIdx.x * 5 % stages : 0; }

// The next stage a warp fetches.
template <int F>
struct Cursor {
    static constexpr int SCALE_STEP = F == FP8 ? 4 : STAGE_LOADS * Stage<F>::CHUNK_SCALE;
    const char *data, *scale;
    int tile, stage, left, stages, loads, scale_blocks, tile_mask, loads_left;

    // From the `done`-th of the `stages` stages of `tile` on; a tile's stages are first_stage + (first_turn + 0, 1, …) %
    // stages. padded_columns is K as stored, a multiple of 64.
    __device__ __forceinline__ Cursor(const char* weights, const char* scales, int tile, int done, int stages, int first_stage,
                                      int padded_columns, int scale_shift)
        : tile(tile), left(stages - done), stages(stages), tile_mask((1 << scale_shift) - 1) {
        loads = padded_columns / Stage<F>::CHUNK;
        scale_blocks = (padded_columns + 127) / 128;
        stage = (first_turn(stages) + done) % stages;
        const int at = first_stage + stage;
        data = weights + ((int64)tile * loads + at * STAGE_LOADS) * LOAD_BYTES;
        if (F == FP8) scale = scales + 4 * ((int64)(tile >> scale_shift) * scale_blocks + at);
        else scale = scales + ((int64)tile * loads + at * STAGE_LOADS) * Stage<F>::CHUNK_SCALE;
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
            // The next tile shares the FP8 scales of this one unless it begins another row of blocks.
            if (F == FP8) scale += (++tile & tile_mask) == 0 ? 4 * scale_blocks : 0;
            else scale += loads * Stage<F>::CHUNK_SCALE;
        }
    }
};

// Brings what follows the rings' first stages into the L2 cache, at most PREFETCH_MB in all blocks, until `stop` is set.
// One warp; lane w follows warp w's piece of the list.
template <int F>
__device__ __forceinline__ void prefetch_stages(
    const char* weights, const char* scales, int tile_begin, int stages, int first_stage, int padded_columns, int share,
    int total, volatile int* stop, int lane) {
    const int loads = padded_columns / Stage<F>::CHUNK;
    const int most = min(share, DEPTH + (PREFETCH_MB << 20) / (int)(gridDim.x * WARPS * Stage<F>::BYTES));
    for (int d = DEPTH; d < most && !*stop; ++d) {
        const int i = lane * share + d;
        if (lane >= WARPS || i >= total) continue;
        const int at = (first_stage + (first_turn(stages) + i) % stages) * STAGE_LOADS;
        const int64 load = (int64)(tile_begin + i / stages) * loads + at;
        const int present = RAGGED_K ? min(STAGE_LOADS, loads - at) : STAGE_LOADS;
        prefetch_l2_bytes(weights + load * LOAD_BYTES, present * LOAD_BYTES);
        if (Stage<F>::CHUNK_SCALE > 0) prefetch_l2_bytes(scales + load * Stage<F>::CHUNK_SCALE, present * Stage<F>::CHUNK_SCALE);
    }
}

// A warp's partial tile: [token][row].
__device__ __forceinline__ void store_partial(float* partial, int lane, const float (&acc)[accumulators(TP)]) {
    const int row = lane / 4, token = lane % 4;
    if constexpr (TP == 8) {
        float* at = partial + 2 * token * TILE_ROWS + row;
        at[0] = acc[0], at[TILE_ROWS] = acc[1], at[8] = acc[2], at[TILE_ROWS + 8] = acc[3];
    } else if (token < TP) {
        float* at = partial + token * TILE_ROWS + row;
        at[0] = acc[0], at[8] = acc[1];
    }
}

// How K is cut: slice s begins at column s · slice_columns and has `stages` stages, of which each warp takes `share` of the
// (tile, stage) list.
template <int F>
struct Slice {
    int begin, columns, stages, share;
    __device__ __forceinline__ Slice(const Arguments& a, int index, int tiles) {
        const int padded_columns = (a.columns + 63) / 64 * 64;
        begin = index * a.slice_columns;
        columns = min(a.slice_columns, a.columns - begin);
        stages = (min(a.slice_columns, padded_columns - begin) + Stage<F>::COLUMNS - 1) / Stage<F>::COLUMNS;
        share = (tiles * stages + WARPS - 1) / WARPS;
    }
};

// What one block has of tiles [tile_begin, tile_end): partial tiles in `partials`, slice after slice of its own, entry
// (tile + warp) of a slice being what a warp has of a tile.
template <int F>
__device__ __forceinline__ void multiply_tiles(
    const Arguments& a, const char* data, const char* scale, int scale_shift, int tile_begin, int tile_end, int rank,
    char* shared, char* x_shared, float* partials, float* inverse, float* scratch, int* arrived) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, tiles = tile_end - tile_begin;
    const int padded_columns = (a.columns + 63) / 64 * 64;
    const unsigned x_lane = shared_address(x_shared) + lane_offset<TP>(lane);
    const unsigned ring = shared_address(shared) + warp * (DEPTH * SLOT);
    for (int index = rank, turn = 0; index * a.slice_columns < a.columns; index += CLUSTER, ++turn) {
        const Slice<F> slice(a, index, tiles);
        const int total = tiles * slice.stages;
        const int first = min(warp * slice.share, total), last = min(first + slice.share, total);
        int tile = first / slice.stages, stage = first % slice.stages;
        Cursor<F> cursor(data, scale, tile_begin + tile, stage, slice.stages, slice.begin / Stage<F>::COLUMNS,
                         padded_columns, scale_shift);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (first + d < last) {
                cursor.fetch(ring + d * SLOT, lane);
                cursor.advance();
            }
            cp_async_commit();
        }
        if (turn == 0) {
            if (PREFETCH_MB > 0 && warp == WARPS)
                prefetch_stages<F>(data, scale, tile_begin, slice.stages, slice.begin / Stage<F>::COLUMNS, padded_columns,
                                   slice.share, total, arrived, lane);
            STAMP(1);
            pdl_wait();
            if (PREFETCH_MB > 0 && threadIdx.x == 0) *static_cast<volatile int*>(arrived) = 1;
            STAMP(2);
        } else {
            __syncthreads();
        }
        stage_activations<TP, FUSED_NORM, is_f16(F)>(
            a.x + slice.begin, a.row_stride, a.tokens, slice.columns, slice.stages * Stage<F>::COLUMNS, a.norm_weight, a.eps,
            x_shared, inverse + turn * TP, scratch);
        STAMP(3);
        float* slice_partials = partials + turn * (tiles + WARPS - 1) * TILE_OUTPUTS;
        float acc[accumulators(TP)] = {};
        constexpr unsigned X_BYTES = activation_bytes(TP, Stage<F>::COLUMNS);
        const unsigned x_end = x_lane + slice.stages * X_BYTES;
        unsigned slot = ring, x_stage = x_lane + (first_turn(slice.stages) + stage) % slice.stages * X_BYTES;
#pragma unroll 1
        for (int i = first; i < last; ++i) {
            cp_async_wait<DEPTH - 1>();
            __syncwarp();
            stage_multiply<F, TP>(slot, x_stage, lane, acc);
            __syncwarp();
            if (i + DEPTH < last) {
                cursor.fetch(slot, lane);
                cursor.advance();
            }
            cp_async_commit();
            slot = slot == ring + (DEPTH - 1) * SLOT ? ring : slot + SLOT;
            x_stage = x_stage + X_BYTES == x_end ? x_lane : x_stage + X_BYTES;
            if (++stage == slice.stages || i + 1 == last) {
                store_partial(slice_partials + (tile + warp) * TILE_OUTPUTS, lane, acc);
#pragma unroll
                for (int j = 0; j < accumulators(TP); ++j) acc[j] = 0.0f;
                ++tile;
                stage = 0;
            }
        }
    }
    STAMP(4);
    cp_async_wait<0>();
    __syncthreads();
    STAMP(5);
}

// Calls emit(tile, output, sum) for every output = 16 · token + row of every tile: the sum over the block's slices and
// warps, in that order. A warp takes a tile.
template <int F, typename Emit>
__device__ __forceinline__ void collect_tiles(
    const Arguments& a, int rank, const float* partials, const float* inverse, int tiles, Emit emit) {
    const int lane = threadIdx.x % WARP;
    for (int tile = threadIdx.x / WARP; tile < tiles; tile += THREADS / WARP) {
        float sums[(TILE_OUTPUTS + WARP - 1) / WARP] = {};
        for (int index = rank, turn = 0; index * a.slice_columns < a.columns; index += CLUSTER, ++turn) {
            const Slice<F> slice(a, index, tiles);
            const int first = tile * slice.stages / slice.share, last = ((tile + 1) * slice.stages - 1) / slice.share;
            const float* entries = partials + (turn * (tiles + WARPS - 1) + tile) * TILE_OUTPUTS;
#pragma unroll
            for (int j = 0; j < (TILE_OUTPUTS + WARP - 1) / WARP; ++j) {
                const int output = lane + j * WARP;
                if (output >= TILE_OUTPUTS) break;
                float sum = 0.0f;
#pragma unroll 1
                for (int warp = first; warp <= last; warp += 4) {
                    float values[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) values[i] = warp + i <= last ? entries[(warp + i) * TILE_OUTPUTS + output] : 0.0f;
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum += values[i];
                }
                sums[j] += sum * inverse[turn * TP + output / TILE_ROWS];
            }
        }
#pragma unroll
        for (int j = 0; j < (TILE_OUTPUTS + WARP - 1) / WARP; ++j) {
            const int output = lane + j * WARP;
            if (output < TILE_OUTPUTS) emit(tile, output, sums[j] * format_factor<F>());
        }
    }
}

// x + token · row_stride + group · group_stride, [tokens, columns]. Clusters [0, groups · clusters0) share tiles0 tiles of
// FORMAT0 per group of rows; the other clusters1 the tiles1 tiles of FORMAT1. scale_shift: log2 of the row tiles per row of
// FP8 block scales. `table` (or null): per matrix (first tile, tiles of FORMAT1 following those of FORMAT0; rows; y offset
// in bytes per token; 1 for float32) with its global_scale; null: one matrix of groups · rows rows to y [tokens, groups ·
// rows]. Shared memory: ring, x_bytes for the activations of a slice, the partial tiles, with CLUSTER > 1 the sums received.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) decode_linear(
    const bf16* x, int row_stride, int group_stride, int tokens, int columns, int slice_columns, const float* norm_weight,
    float eps, char* y, const char* data0, const char* scale0, int tiles0, int clusters0, int groups, const char* data1,
    const char* scale1, int tiles1, int clusters1, int scale_shift, const float* global_scale, const int4* table, int matrices,
    int rows, int float32_out, int x_bytes, int partial_bytes
#ifdef TIMELINE
    , unsigned long long* timeline
#endif
    ) {
    pdl_launch();
    STAMP(0);
    extern __shared__ __align__(16) char shared[];
    __shared__ float inverse[MAX_SLICES * TP], scratch[2 * TP * 33], global_scales[MAX_MATRICES];
    __shared__ int4 entries[MAX_MATRICES];
    __shared__ int arrived;
    __shared__ uint64 inbox;
    char* x_shared = shared + WARPS * DEPTH * SLOT;
    float* partials = reinterpret_cast<float*>(x_shared + x_bytes);
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, cluster = blockIdx.x / CLUSTER;
    const bool second = FORMAT1 >= 0 && cluster >= groups * clusters0;
    const int group = second ? 0 : cluster / clusters0, member = second ? cluster - clusters0 : cluster % clusters0;
    const int row_begin = group * rows, row_end = table ? 1 << 30 : row_begin + rows;
    const int matrix_tiles = second ? tiles1 : tiles0, members = second ? clusters1 : clusters0;
    const int group_tile = table ? 0 : row_begin / TILE_ROWS;
    const int tile_limit = table ? 1 << 30 : (groups * rows + TILE_ROWS - 1) / TILE_ROWS;
    const int tile_begin = group_tile + (int)((int64)member * matrix_tiles / members);
    const int tile_end =
        max(tile_begin, min(tile_limit, group_tile + (int)((int64)(member + 1) * matrix_tiles / members)));
    const int tiles = tile_end - tile_begin;
    const Arguments a = {x + (int64)group * group_stride, row_stride, tokens, columns, slice_columns, norm_weight, eps};
    const int inbox_bytes = (CLUSTER - 1) * ((tiles + CLUSTER - 1 - rank) / CLUSTER) * TILE_OUTPUTS * 4;
    if (CLUSTER > 1) cluster_start(&inbox, 1);
    if (PREFETCH_MB > 0) {
        if (threadIdx.x == 0) arrived = 0;
        __syncthreads();
    }
    if (CLUSTER > 1 && threadIdx.x == 0 && inbox_bytes > 0) expect_mail(&inbox, inbox_bytes);
    if (threadIdx.x < matrices) {
        if (table) cp_async16(shared_address(entries + threadIdx.x), table + threadIdx.x);
        else entries[threadIdx.x] = make_int4(0, groups * rows, 0, float32_out);
        if (global_scale) cp_async4(shared_address(global_scales + threadIdx.x), global_scale + threadIdx.x);
        else global_scales[threadIdx.x] = 1.0f;
    }
    if (FUSED_NORM) {
        for (int i = threadIdx.x * 32; i < columns; i += THREADS * 32) prefetch_l2(norm_weight + i);
    }
    if (second) {
        if constexpr (FORMAT1 >= 0)
            multiply_tiles<FORMAT1>(a, data1, scale1, scale_shift, tile_begin, tile_end, rank, shared, x_shared, partials,
                                    inverse, scratch, &arrived);
    } else {
        multiply_tiles<FORMAT0>(a, data0, scale0, scale_shift, tile_begin, tile_end, rank, shared, x_shared, partials, inverse,
                                scratch, &arrived);
    }
    const auto store = [&](int tile, int output, float value) {
        const int row_in_tile = output % TILE_ROWS, token = output / TILE_ROWS;
        const int listed = tile_begin + tile + (second ? tiles0 : 0);
        int m = 0;
        while (m + 1 < matrices && listed >= entries[m + 1].x) ++m;
        const int4 entry = entries[m];
        const int row = (listed - entry.x) * TILE_ROWS + row_in_tile;
        if (token >= tokens || row >= entry.y || row < row_begin || row >= row_end) return;
        value *= global_scales[m];
        char* out = y + (int64)entry.z * tokens;
        const int64 at = (int64)token * entry.y + row;
        if (entry.w) reinterpret_cast<float*>(out)[at] = value;
        else reinterpret_cast<bf16*>(out)[at] = __float2bfloat16(value);
    };
    if constexpr (CLUSTER == 1) {
        if (second) {
            if constexpr (FORMAT1 >= 0) collect_tiles<FORMAT1>(a, rank, partials, inverse, tiles, store);
        } else {
            collect_tiles<FORMAT0>(a, rank, partials, inverse, tiles, store);
        }
    } else {
        // Tile t is finished by the block of rank t % CLUSTER: [t / CLUSTER][rank of the sender][output].
        float* received = reinterpret_cast<float*>(x_shared + x_bytes + partial_bytes);
        const auto pass_on = [&](int tile, int output, float value) {
            float* slot = received + ((tile / CLUSTER) * CLUSTER + rank) * TILE_OUTPUTS + output;
            if (tile % CLUSTER == rank) *slot = value;
            else send(slot, &inbox, tile % CLUSTER, value);
        };
        cluster_started();
        if (second) {
            if constexpr (FORMAT1 >= 0) collect_tiles<FORMAT1>(a, rank, partials, inverse, tiles, pass_on);
        } else {
            collect_tiles<FORMAT0>(a, rank, partials, inverse, tiles, pass_on);
        }
        if (inbox_bytes > 0) wait_mail(&inbox, 0);
        __syncthreads();
        for (int i = threadIdx.x; i < tiles * TILE_OUTPUTS; i += THREADS) {
            const int tile = i / TILE_OUTPUTS, output = i % TILE_OUTPUTS;
            if (tile % CLUSTER != rank) continue;
            float sum = 0.0f;
#pragma unroll
            for (int sender = 0; sender < CLUSTER; ++sender)
                sum += received[((tile / CLUSTER) * CLUSTER + sender) * TILE_OUTPUTS + output];
            store(tile, output, sum);
        }
    }
#ifdef TIMELINE
    STAMP(6);
    if (threadIdx.x == 0) for (int i = 0; i < 7; ++i) timeline[blockIdx.x * 8 + i] = stamps[i];
    if (threadIdx.x == 0) { unsigned sm; asm volatile("mov.u32 %0, %%smid;" : "=r"(sm)); timeline[blockIdx.x * 8 + 7] = sm; }
#endif
}
