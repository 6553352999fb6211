// Scores of the lightning indexer: score(t, s) = Σ_h relu(q_th · k_s) · w_th · score_scale over the
// entries that token t sees, written as integers that sort like the scores (index_order.cuh).
// Tokens that see no more entries than they may select are skipped: top_k lists all of them.
//
// index_scores: tensor cores, rows of 128 values, HEADS a multiple of 8. Keys are the rows of the
// m16n8k16 product, 16 a tile, and queries its columns, so that a key is converted once for all
// heads; each warp owns whole tiles. With FP8 1 both sides are e4m3, whose values float16 holds
// exactly; their scales multiply the float32 sums. With FP8 0 keys are bfloat16.
// Tokens may be those of one rank (token_share.cuh). Its first one is the first of q and weights,
// and number `first_token` of the step, whose positions are given; scores are of its tokens alone.
// index_scores_any_geometry: one warp per entry, float32 arithmetic, for every other shape.
#include "index_products.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#include "token_share.cuh"

// Dynamic shared memory of index_scores.
#ifndef SHARED_BYTES
#define SHARED_BYTES (200 << 10)
#endif

constexpr int KEYS = 16;
constexpr int WARPS = 8;
constexpr int STAGES = 4;
constexpr int HEAD_TILES = HEADS / 8, STEPS = DIM / 16;
constexpr int ROW_BYTES = FP8 ? DIM : 2 * DIM;
constexpr int ROW_CHUNKS = ROW_BYTES / 16;
constexpr int TILE_BYTES = KEYS * ROW_BYTES;

struct Shared {
    uint4 query_fragments[HEAD_TILES][STEPS / 2][WARP];
    bf16 raw_queries[HEADS * DIM];
    float factors[HEADS];
    alignas(16) char keys[WARPS][STAGES][TILE_BYTES];
    float key_scales[WARPS][STAGES][KEYS];
};
static_assert(sizeof(Shared) <= SHARED_BYTES && HEAD_TILES <= WARPS);

__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
    if (FP8) mma_f16(sum, a, b0, b1);
    else mma_bf16(sum, a, b0, b1);
}

// Starts the copy of one token's queries; the caller commits.
__device__ __forceinline__ void fetch_queries(Shared& shared, const bf16* q, int token) {
    const bf16* from = q + own_token(token, 0) * HEADS * DIM;
    for (int i = threadIdx.x; i < HEADS * DIM / 8; i += WARPS * WARP)
        copy_or_zero<16>(shared_address(shared.raw_queries + 8 * i), from + 8 * i, true);
}

// The head whose query this lane rounds, together with three other lanes.
__device__ __forceinline__ int own_head() { return threadIdx.x / 4; }

// torch: queries = unpack_index_rows(*pack_index_rows(queries)). Each warp rounds eight heads and
// lays them out as the fragments that all warps multiply by; the head's factor takes the query's
// scale along. `weight`: of the lane's own head, if there is one.
__device__ __forceinline__ void prepare_queries(Shared& shared, float weight, float score_scale) {
    const int lane = threadIdx.x % WARP;
    const int part = lane % 4;
    const int head = own_head();
    const int tile = threadIdx.x / WARP;
    if (tile < HEAD_TILES) {
        QueryPart query;
        query.load(shared.raw_queries + head * DIM, part);
        const float scale = query.round();
        if (part == 0) shared.factors[head] = weight * score_scale * scale;
#pragma unroll
        for (int i = 0; i < 4; ++i) shared.query_fragments[tile][i][lane] = query.pairs[i];
    }
}

// Starts the copy of 16 key rows and their scales into a stage of this warp's ring. Rows past the
// last visible entry become zeros: what they hold must not be read.
__device__ __forceinline__ void fetch_keys(Shared& shared, int warp, int stage, const char* data,
                                           const float* scales, int tile, int visible) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < KEYS * ROW_CHUNKS / WARP; ++i) {
        const int row = (lane + WARP * i) / ROW_CHUNKS;
        const int chunk = (lane + WARP * i) % ROW_CHUNKS;
        const bool valid = tile * KEYS + row < visible;
        const int64 entry = valid ? tile * KEYS + row : 0;
        // Odd rows swap chunks 0-3 with 4-7, so that the eight lanes of a load phase meet all
        // banks.
        char* to = shared.keys[warp][stage] + 16 * (row * ROW_CHUNKS + (chunk ^ (row & 1) << 2));
        copy_or_zero<16>(shared_address(to), data + entry * ROW_BYTES + 16 * chunk, valid);
    }
    if (FP8 && lane < KEYS) {
        const bool valid = tile * KEYS + lane < visible;
        copy_or_zero<4>(shared_address(&shared.key_scales[warp][stage][lane]),
                        scales + (valid ? tile * KEYS + lane : 0), valid);
    }
}

__device__ __forceinline__ void score_tile(const Shared& shared, int warp, int stage,
                                           const uint4 (&queries)[HEAD_TILES][STEPS / 2],
                                           const float2 (&factors)[HEAD_TILES], float (&score)[2]) {
    const int lane = threadIdx.x % WARP;
    const int row = lane / 4;
    const int part = lane % 4;
    const char* keys = shared.keys[warp][stage];
    uint4 raw[2][LANE_CHUNKS];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < LANE_CHUNKS; ++i) {
            const int chunk = (4 * i + part) ^ (row & 1) << 2;
            raw[half][i] = *reinterpret_cast<const uint4*>(
                keys + 16 * ((row + 8 * half) * ROW_CHUNKS + chunk));
        }
    }
    float sums[HEAD_TILES][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        unsigned a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#if FP8
            const uint4& chunk = raw[half][step / 4];
            const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
            const uint2 halves = e4m3x4_to_f16x4(words[step % 4]);
            a[half] = halves.x;
            a[2 + half] = halves.y;
#else
            const uint4& chunk = raw[half][step / 2];
            a[half] = step % 2 ? chunk.z : chunk.x;
            a[2 + half] = step % 2 ? chunk.w : chunk.y;
#endif
        }
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; ++tile) {
            const uint4& b = queries[tile][step / 2];
            // dots_HS += queries_HD @ keys_SD.T
            multiply(sums[tile], a, step % 2 ? b.z : b.x, step % 2 ? b.w : b.y);
        }
    }
    sum_heads(score, sums, 0, factors);
}

// The first item from `item` on, in steps of the grid, that has work: an item is a token and one of
// max_parts shares of its tiles. A token of few tiles is cut into fewer parts, of at least
// part_tiles tiles.
struct Item {
    int token, part, parts, visible;
};

__device__ __forceinline__ bool next_item(Item& found, int& item, const settled_int64* positions,
                                          int slots, int tokens, int selected, int max_parts,
                                          int part_tiles) {
    for (; item < tokens * max_parts; item += gridDim.x) {
        found.token = item % tokens, found.part = item / tokens;
        const settled_int64* position = positions + own_token(found.token, 0);
        found.visible = visible_entries(fetch_settled(position), slots);
        found.parts = max(1, min(max_parts, (found.visible + KEYS - 1) / KEYS / part_tiles));
        if (found.visible > selected && found.part < found.parts) return true;
    }
    return false;
}

// Starts the copies of those of the first tiles of a warp's part that lie in [begin, end), a group
// each. Kept a loop: a launch runs through this once, and waits for instructions that it has not
// met.
__device__ __forceinline__ void start_keys(Shared& shared, const char* data, const float* scales,
                                           const Item& item, int begin, int end) {
    const int warp = threadIdx.x / WARP;
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        const int tile = item.part + item.parts * (warp + WARPS * stage);
        if (tile >= begin && tile < end)
            fetch_keys(shared, warp, stage, data, scales, tile, item.visible);
        cp_async_commit();
    }
}

// Blocks take items round robin; the queries of the next item are fetched while this one is
// computed.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, 1)
    index_scores(const bf16* q, const float* weights, float score_scale, const char* data,
                 const float* scales, const settled_int64* positions, unsigned* scores, int* nan,
                 int slots, int score_stride, int weight_stride, int first_token, int tokens,
                 int selected, int max_parts, int part_tiles) {
    extern __shared__ __align__(16) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    pdl_launch();
    // Entries that the step completes come from the kernels in front; the others they do not touch.
    const int old_tiles = visible_entries(fetch_settled(positions) - 1, slots) / KEYS;
    positions += first_token;
    int item = blockIdx.x;
    Item now;
    bool more = next_item(now, item, positions, slots, tokens, selected, max_parts, part_tiles);
    if (more) start_keys(shared, data, scales, now, 0, old_tiles);
    pdl_wait();
    if (more) {
        fetch_queries(shared, q, now.token);
        start_keys(shared, data, scales, now, old_tiles, (now.visible + KEYS - 1) / KEYS);
    }
    bool first_item = true;
    while (more) {
        const int tiles = (now.visible + KEYS - 1) / KEYS;
        const int first = now.part + now.parts * warp;
        const int stride = now.parts * WARPS;
        const int visible = now.visible, token = now.token;
        const float weight =
            own_head() < HEADS ? weights[own_token(token, 0) * weight_stride + own_head()] : 0.0f;
        if (first_item) {
            cp_async_wait<0>();
        } else {
            start_keys(shared, data, scales, now, 0, tiles);
            cp_async_wait<STAGES - 1>();
        }
        first_item = false;
        __syncthreads();
        // queries_HD = unpack_index_rows(*pack_index_rows(queries_HD))
        // factors_H = weights_H * score_scale
        prepare_queries(shared, weight, score_scale);
        __syncthreads();
        item += gridDim.x;
        more = next_item(now, item, positions, slots, tokens, selected, max_parts, part_tiles);
        if (more) fetch_queries(shared, q, now.token);
        cp_async_commit();
        // Reading the queries takes longer than a tile of keys.
        if (first >= tiles) continue;
        uint4 queries[HEAD_TILES][STEPS / 2];
        float2 factors[HEAD_TILES];
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < STEPS / 2; ++i)
                queries[tile][i] = shared.query_fragments[tile][i][lane];
            factors[tile] =
                *reinterpret_cast<const float2*>(shared.factors + 8 * tile + 2 * (lane % 4));
        }
        unsigned* row = scores + (int64)token * score_stride;
        int stage = 0;
        for (int tile = first; tile < tiles; tile += stride) {
            cp_async_wait<STAGES - 2>();
            __syncwarp();
            float score[2];
            // score_S = (relu(queries_HD @ keys_SD.T) * factors_H[:, None]).sum(0)
            score_tile(shared, warp, stage, queries, factors, score);
            const int key = written_key(lane);
            const float scale = FP8 ? shared.key_scales[warp][stage][key] : 1.0f;
            write_score(row, tile * KEYS + key, visible, lane, score, scale, nan);
            const int ahead = tile + (STAGES - 1) * stride;
            const int target = (stage + STAGES - 1) % STAGES;
            __syncwarp();
            if (ahead < tiles) fetch_keys(shared, warp, target, data, scales, ahead, visible);
            cp_async_commit();
            stage = (stage + 1) % STAGES;
        }
    }
    cp_async_wait<0>();
}

__device__ __forceinline__ float any_value(const void* data, int64 index, int format) {
    if (format == ROW_INDEX_FP8)
        return __half2float(__half(__nv_cvt_fp8_to_halfraw(
            static_cast<const __nv_fp8_storage_t*>(data)[index], __NV_E4M3)));
    if (format == ROW_BF16) return __bfloat162float(static_cast<const bf16*>(data)[index]);
    return static_cast<const float*>(data)[index];
}

// `key_format`: ROW_INDEX_FP8 (e4m3 with a scale per row), ROW_BF16 or ROW_F32. Grid (blocks,
// tokens); every block rounds the queries of its token. Shared memory: heads · dim + heads floats.
extern "C" __global__ void __launch_bounds__(256)
    index_scores_any_geometry(const bf16* q, const float* weights, float score_scale,
                              const void* data, const float* scales, const int64* positions,
                              unsigned* scores, int* nan, int slots, int score_stride,
                              int weight_stride, int first_token, int selected, int heads, int dim,
                              int key_format) {
    extern __shared__ __align__(16) char memory[];
    assert_shared_memory(heads * (dim + 1) * sizeof(float));
    float* queries = reinterpret_cast<float*>(memory);
    float* factors = queries + heads * dim;
    const int token = blockIdx.y;
    const int64 source = own_token(token, 0);
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const int warps = blockDim.x / WARP;
    pdl_launch();
    pdl_wait();
    const int visible = visible_entries(positions[first_token + source], slots);
    if (visible <= selected || (int)(blockIdx.x * warps) >= visible) return;
    for (int head = warp; head < heads; head += warps) {
        const bf16* row = q + (source * heads + head) * dim;
        float peak = 0.0f;
        for (int i = lane; i < dim; i += WARP)
            peak = nan_max(peak, fabsf(__bfloat162float(row[i])));
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2)
            peak = nan_max(peak, __shfl_xor_sync(~0u, peak, offset));
        // queries_HD = unpack_index_rows(*pack_index_rows(queries_HD))
        const float scale = peak > 0.0f ? peak / 448.0f : 1.0f;
        for (int i = lane; i < dim; i += WARP) {
            float value = __bfloat162float(row[i]);
            if (key_format == ROW_INDEX_FP8) {
                const __half_raw rounded = __nv_cvt_fp8_to_halfraw(
                    __nv_cvt_float_to_fp8(value / scale, __NV_SATFINITE, __NV_E4M3), __NV_E4M3);
                value = __half2float(__half(rounded)) * scale;
            }
            queries[head * dim + i] = value;
        }
        if (lane == 0) factors[head] = weights[source * weight_stride + head] * score_scale;
    }
    __syncthreads();
    for (int entry = blockIdx.x * warps + warp; entry < visible; entry += gridDim.x * warps) {
        const float scale = key_format == ROW_INDEX_FP8 ? scales[entry] : 1.0f;
        float score = 0.0f;
        for (int head = 0; head < heads; ++head) {
            float dot = 0.0f;
            for (int i = lane; i < dim; i += WARP)
                dot = fmaf(queries[head * dim + i],
                           any_value(data, (int64)entry * dim + i, key_format) * scale, dot);
            // score_S = (relu(queries_HD @ keys_SD.T) * factors_H[:, None]).sum(0)
            score = fmaf(nan_max(warp_sum(dot), 0.0f), factors[head], score);
        }
        if (lane == 0) {
            scores[(int64)token * score_stride + entry] = order_of(score);
            note_nan(nan, score);
        }
    }
}
