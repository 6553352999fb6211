// index_scores of many tokens on Hopper, by wgmma, with the same bits: 64 keys are the rows of a
// product, in registers, and the queries of two tokens its columns, in shared memory. A key is
// converted once for all tokens of a block.
#include "index_products.cuh"
#include "ptx.cuh"
#include "token_share.cuh"
#include "wgmma.cuh"

#ifndef SHARED_BYTES
#define SHARED_BYTES (136 << 10)
#endif
static_assert(FP8, "float16 holds what is multiplied");

constexpr int GROUPS = 4;  // warpgroups
constexpr int THREADS = 4 * WARP * GROUPS;
constexpr int TILE = 64;  // keys of a warpgroup at once
constexpr int COLUMN_TOKENS = 2;
constexpr int COLUMNS = COLUMN_TOKENS * HEADS;
static_assert(COLUMNS == 128, "of the wgmma below");
static_assert(THREADS == 4 * COLUMNS, "four lanes round a query of a product");
constexpr int PRODUCTS = 4;  // of a tile
constexpr int TOKENS = PRODUCTS * COLUMN_TOKENS;
constexpr int STEPS = DIM / 16;
constexpr int LINES = DIM / 64, LINE_STEPS = STEPS / LINES;  // 64 values of a query

struct Shared {
    uint4 queries[PRODUCTS][LINES][COLUMNS][8];  // with the swizzle of wgmma.cuh
    float factors[TOKENS][HEADS];
    int visible[TOKENS];  // 0: nothing to score
};
// The queries begin at a 1024-byte border.
static_assert(sizeof(Shared) + 1024 <= SHARED_BYTES, "as the launcher counts it");

// queries_HD = unpack_index_rows(*pack_index_rows(queries_HD)), factors_H = weights_H * score_scale
// of the tokens from `first` on; the last one stands for those behind it.
__device__ __forceinline__ void prepare_queries(Shared& shared, const bf16* q, const float* weights,
                                                float score_scale, int first, int tokens,
                                                int weight_stride) {
    const int part = threadIdx.x % 4, column = threadIdx.x / 4;
    const int head = column % HEADS, token = column / HEADS;
    QueryPart query[PRODUCTS];
    float weight[PRODUCTS];
#pragma unroll
    for (int product = 0; product < PRODUCTS; ++product) {
        const int own = min(first + product * COLUMN_TOKENS + token, tokens - 1);
        const int64 source = own_token(own, 0);
        query[product].load(q + (source * HEADS + head) * DIM, part);
        weight[product] = weights[source * weight_stride + head];
    }
#pragma unroll
    for (int product = 0; product < PRODUCTS; ++product) {
        const float scale = query[product].round();
        if (part == 0)
            shared.factors[product * COLUMN_TOKENS + token][head] =
                weight[product] * score_scale * scale;
        // Two words in a row are a step's values 2 part, 2 part + 1, and those 8 behind.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4& pairs = query[product].pairs[i];
            const unsigned words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
            unsigned* line = reinterpret_cast<unsigned*>(shared.queries[product][i / 2][column]);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                line[4 * ((4 * (i % 2) + j) ^ column % 8) + part] = words[j];
        }
    }
}

// What a lane has of its warp's 16 keys of a tile: those of lane / 4 and 8 behind, and a scale.
struct Keys {
    uint4 codes[2][LANE_CHUNKS];
    float scale;

    // Entries from `end` on are not read: the last one stands for them.
    __device__ __forceinline__ void load(const char* data, const float* scales, int first, int end,
                                         int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64 entry = min(first + lane / 4 + 8 * half, end - 1);
            const uint4* row = reinterpret_cast<const uint4*>(data + entry * DIM);
#pragma unroll
            for (int i = 0; i < LANE_CHUNKS; ++i)
                codes[half][i] = row[4 * i + lane % 4];
        }
        scale = scales[min(first + written_key(lane), end - 1)];
    }

    __device__ __forceinline__ void convert(unsigned (&a)[STEPS][4]) const {
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4& chunk = codes[half][step / 4];
                const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
                const uint2 halves = e4m3x4_to_f16x4(words[step % 4]);
                a[step][half] = halves.x;
                a[step][2 + half] = halves.y;
            }
    }
};

#define PRODUCT(ADDS)                                                                    \
    WGMMA_PRODUCT(128, "f16.f16", ADDS, REGS64, 64, 65, 66, 67, 68, ACC16(0), ACC16(4), \
                  ACC16(8), ACC16(12))
template <bool ADDS>
__device__ __forceinline__ void wgmma(float (&c)[COLUMNS / 8][4], const unsigned (&a)[4],
                                      unsigned long long b) {
    if constexpr (ADDS) PRODUCT(1);
    else PRODUCT(0);
}

// dots_HS = queries_HD @ keys_SD.T
__device__ __forceinline__ void multiply(float (&dots)[COLUMNS / 8][4], unsigned (&a)[STEPS][4],
                                         const uint4 (&queries)[LINES][COLUMNS][8]) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const unsigned long long b = swizzled_rows(shared_address(queries[step / LINE_STEPS])) +
                                     2 * (step % LINE_STEPS);
        if (step == 0) wgmma<false>(dots, a[step], b);
        else wgmma<true>(dots, a[step], b);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) keep(a[step]);
}

// An item is eight tokens and one of max_parts shares of the tiles that they see; parts have at
// least part_tiles tiles. Blocks take items round robin, all first parts first.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    index_scores_sm90(const bf16* q, const float* weights, float score_scale, const char* data,
                      const float* scales, const int64* positions, unsigned* scores, int* nan,
                      int slots, int score_stride, int weight_stride, int first_token, int tokens,
                      int selected, int max_parts, int part_tiles) {
    extern __shared__ unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-shared_address(memory) & 1023));
    const int group = threadIdx.x / (4 * WARP), warp = threadIdx.x / WARP % 4;
    const int lane = threadIdx.x % WARP;
    const int token_groups = (tokens + TOKENS - 1) / TOKENS;
    pdl_wait();
    pdl_launch();
    positions += first_token;
    for (int item = blockIdx.x; item < token_groups * max_parts; item += gridDim.x) {
        const int group_token = item % token_groups * TOKENS, part = item / token_groups;
        __syncthreads();  // the queries of the item before are not needed any more
        if (threadIdx.x < TOKENS) {
            const int token = group_token + threadIdx.x;
            const int seen =
                token < tokens ? visible_entries(positions[own_token(token, 0)], slots) : 0;
            shared.visible[threadIdx.x] = seen > selected ? seen : 0;
        }
        __syncthreads();
        int end = 0;
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) end = max(end, shared.visible[token]);
        const int tiles = (end + TILE - 1) / TILE;
        const int parts = max(1, min(max_parts, tiles / part_tiles));
        if (part >= min(parts, tiles)) continue;
        const int stride = parts * GROUPS, first_key = 16 * warp;
        int tile = part + parts * group;
        Keys keys;
        if (tile < tiles) keys.load(data, scales, tile * TILE + first_key, end, lane);
        prepare_queries(shared, q, weights, score_scale, group_token, tokens, weight_stride);
        proxy_fence();
        __syncthreads();
        for (; tile < tiles; tile += stride) {
            const int entry = tile * TILE + first_key + written_key(lane);
            const float scale = keys.scale;
            unsigned a[STEPS][4];
            keys.convert(a);
            if (tile + stride < tiles)
                keys.load(data, scales, (tile + stride) * TILE + first_key, end, lane);
#pragma unroll 1
            for (int product = 0; product < PRODUCTS; ++product) {
                float dots[COLUMNS / 8][4];
                multiply(dots, a, shared.queries[product]);
#pragma unroll
                for (int i = 0; i < COLUMN_TOKENS; ++i) {
                    const int token = product * COLUMN_TOKENS + i;
                    float2 factors[HEADS / 8];
#pragma unroll
                    for (int j = 0; j < HEADS / 8; ++j)
                        factors[j] = *reinterpret_cast<const float2*>(shared.factors[token] +
                                                                      8 * j + 2 * (lane % 4));
                    float score[2];
                    sum_heads(score, dots, i * (HEADS / 8), factors);
                    write_score(scores + (int64)(group_token + token) * score_stride, entry,
                                shared.visible[token], lane, score, scale, nan);
                }
            }
        }
    }
}
