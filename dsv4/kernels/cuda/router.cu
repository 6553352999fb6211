// Router: logits of the gate, log of sqrt(softplus), the P best experts (or those of a table), their softmax weights.
//
//   router_decode   1 to 8 tokens in one launch: every block multiplies one row tile of the gate with a part of K, the
//                   last block to finish selects, one warp per token
//   router_select   the selection alone, for logits that exist: one warp per token
//
// Defines: PER_LANE (experts per lane of a selecting warp, ceil(X / 32)), HASH (1: ids come from a table).
#include "common.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP, MAX_TOKENS = 8;
// 512-byte chunks of the gate that a warp requests before it waits for the activations.
constexpr int LOADS = 12;

__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint4& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// 0.5 * log(softplus(l)); below -15 softplus(l) is e^l to float32 precision, its log is l.
__device__ __forceinline__ float log_score(float logit) {
    const float softplus = log1pf(expf(-fabsf(logit))) + (logit < 0.0f ? 0.0f : logit);
    return 0.5f * (logit < -15.0f ? logit : logf(softplus));
}

// Unsigned order of floats as torch sorts them: NaN above everything, -0 equal to +0. Never 0.
__device__ __forceinline__ unsigned sort_key(float value) {
    if (value != value) return ~0u;
    const unsigned bits = __float_as_uint(value + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Selection works on shared memory: per token `scores` (log scores) and, unless HASH, `keys` (their order).
__device__ __forceinline__ void store_score(float* scores, unsigned* keys, const float* bias_X, int expert, float logit) {
    const float value = log_score(logit);
    scores[expert] = value;
#if !HASH
    keys[expert] = sort_key(expf(value) + bias_X[expert]);
#endif
}

__device__ __forceinline__ int64 listed_expert(const int64* table_VP, const int64* tokens_T, int token, int p, int P, int V) {
    const int64 row = min(max(__ldcg(tokens_T + token), 0ll), int64(V - 1));
    return table_VP[row * P + p];
}

// One warp, one token. `listed_P`: with HASH, its experts by the table.
__device__ __forceinline__ void select(const float* scores, const unsigned* keys, const int64* listed_P, int64* ids_TP,
                                       float* weights_TP, int token, int X, int P, float scaling) {
    const int lane = threadIdx.x % WARP;
    int64 id = 0;
#if HASH
    if (lane < P) id = listed_P[lane];
#else
    unsigned key[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int expert = i * WARP + lane;
        key[i] = expert < X ? keys[expert] : 0;
    }
    for (int p = 0; p < P; ++p) {
        unsigned best = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) best = max(best, key[i]);
        best = __reduce_max_sync(~0u, best);
        unsigned expert = ~0u;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; --i)
            if (key[i] == best) expert = i * WARP + lane;
        expert = __reduce_min_sync(~0u, expert);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (expert == i * WARP + lane) key[i] = 0;
        if (lane == p) id = expert;
    }
#endif
    const float value = lane < P ? scores[min(max(id, 0ll), int64(X - 1))] : __int_as_float(0xff800000);
    const float largest = warp_max(value);
    const float share = lane < P ? expf(value - largest) : 0.0f;
    const float total = warp_sum(share);
    if (lane < P) {
        ids_TP[int64(token) * P + lane] = id;
        weights_TP[int64(token) * P + lane] = share / total * scaling;
    }
}

// Two neighbours of a row of x; zero beyond E.
__device__ __forceinline__ unsigned load_pair(const bf16* row, int k, int E, bool even) {
    if (even) return k < E ? __ldcg(reinterpret_cast<const unsigned*>(row + k)) : 0u;
    const unsigned low = k < E ? __bfloat16_as_ushort(row[k]) : 0, high = k + 1 < E ? __bfloat16_as_ushort(row[k + 1]) : 0;
    return low | high << 16;
}

// Grid: row tiles of 16 experts times `parts` parts of K. partial: float [parts, T, tiles * 16].
extern "C" __global__ void __launch_bounds__(THREADS)
    router_decode(const bf16* x_TE, const char* gate, const float* bias_X, const int64* table_VP, const int64* tokens_T,
                  int64* ids_TP, float* weights_TP, float* partial, int* counter, int T, int E, int X, int P, int V,
                  int parts, float scaling) {
    __shared__ float sums[WARPS][MAX_TOKENS * 16];
    __shared__ float scores[MAX_TOKENS * PER_LANE * WARP];
    __shared__ unsigned keys[HASH ? 1 : MAX_TOKENS * PER_LANE * WARP];
    // What only the last block uses, but would otherwise wait for at its end.
    __shared__ float bias[HASH ? 1 : PER_LANE * WARP];
    __shared__ int64 listed[HASH ? MAX_TOKENS * WARP : 1];
    __shared__ int flag;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int tile = blockIdx.x / parts, part = blockIdx.x % parts, tiles = gridDim.x / parts;
    const int chunks = (E + 63) / 64 * 4;
    // This warp's chunks: worker, worker + workers, ...
    const int worker = part * WARPS + warp, workers = parts * WARPS;
    const char* weights = gate + size_t(tile) * chunks * 512 + lane * 16;

    uint4 a[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int chunk = worker + i * workers;
        a[i] = chunk < chunks ? load_stream(weights + size_t(chunk) * 512) : make_uint4(0, 0, 0, 0);
    }
#if !HASH
    for (int i = threadIdx.x; i < X; i += THREADS) bias[i] = bias_X[i];
#endif
    // Behind these loads, so that the next kernel's prefetches do not overtake them.
    pdl_launch();
    pdl_wait();
#if HASH
    if (int(threadIdx.x) < T * P)
        listed[threadIdx.x] = listed_expert(table_VP, tokens_T, threadIdx.x / P, threadIdx.x % P, P, V);
#endif
    const int token = lane / 4, column = lane % 4 * 2;
    const bf16* row = x_TE + size_t(min(token, T - 1)) * E;
    const int width = token < T ? E : 0;
    const bool even = E % 2 == 0;
    float acc[2][4] = {};
    for (int base = worker; base < chunks; base += LOADS * workers) {
        unsigned b[LOADS][2];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int k = (base + i * workers) * 16 + column;
            b[i][0] = load_pair(row, k, width, even), b[i][1] = load_pair(row, k + 8, width, even);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) mma_bf16(acc[i & 1], a[i], b[i][0], b[i][1]);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int chunk = base + (LOADS + i) * workers;
            a[i] = chunk < chunks ? load_stream(weights + size_t(chunk) * 512) : make_uint4(0, 0, 0, 0);
        }
    }
    float* mine = sums[warp] + lane % 4 * 2 * 16 + lane / 4;
    mine[0] = acc[0][0] + acc[1][0];
    mine[16] = acc[0][1] + acc[1][1];
    mine[8] = acc[0][2] + acc[1][2];
    mine[24] = acc[0][3] + acc[1][3];
    __syncthreads();
    for (int i = threadIdx.x; i < T * 16; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += sums[w][i];
        __stcg(partial + (size_t(part) * T + i / 16) * tiles * 16 + tile * 16 + i % 16, sum);
    }
    if (!last_arriver(counter, gridDim.x, &flag)) return;
    // All parts of up to AHEAD times four logits per thread are requested before the first sum.
    constexpr int AHEAD = 2, MAX_PARTS = 8;
    const int quads = (X + 3) / 4;
    for (int base = threadIdx.x; base < T * quads; base += AHEAD * THREADS) {
        float4 value[AHEAD][MAX_PARTS];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int index = base + i * THREADS, t = index / quads, expert = (index - t * quads) * 4;
            const float* from = partial + size_t(t) * tiles * 16 + expert;
#pragma unroll
            for (int p = 0; p < MAX_PARTS; ++p)
                value[i][p] = p < parts && t < T
                                  ? __ldcg(reinterpret_cast<const float4*>(from + size_t(p) * T * tiles * 16))
                                  : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int index = base + i * THREADS, t = index / quads, expert = (index - t * quads) * 4;
            float sum[4] = {};
#pragma unroll
            for (int p = 0; p < MAX_PARTS; ++p) {
                sum[0] += value[i][p].x, sum[1] += value[i][p].y;
                sum[2] += value[i][p].z, sum[3] += value[i][p].w;
            }
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (t < T && expert + e < X)
                    store_score(scores + t * PER_LANE * WARP, keys + t * PER_LANE * WARP, bias, expert + e, sum[e]);
        }
    }
    __syncthreads();
    if (warp < T)
        select(scores + warp * PER_LANE * WARP, keys + warp * PER_LANE * WARP, listed + (HASH ? warp * P : 0), ids_TP,
               weights_TP, warp, X, P, scaling);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    router_select(const float* logits_TX, const float* bias_X, const int64* table_VP, const int64* tokens_T, int64* ids_TP,
                  float* weights_TP, int T, int X, int P, int V, float scaling) {
    __shared__ float scores[WARPS * PER_LANE * WARP];
    __shared__ unsigned keys[HASH ? 1 : WARPS * PER_LANE * WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, token = blockIdx.x * WARPS + warp;
    pdl_wait();
    pdl_launch();
    if (token >= T) return;
    float* my_scores = scores + warp * PER_LANE * WARP;
    unsigned* my_keys = keys + (HASH ? 0 : warp * PER_LANE * WARP);
    for (int expert = lane; expert < X; expert += WARP)
        store_score(my_scores, my_keys, bias_X, expert, logits_TX[size_t(token) * X + expert]);
    __syncwarp();
    __shared__ int64 listed[HASH ? WARPS * WARP : 1];
#if HASH
    if (lane < P) listed[warp * P + lane] = listed_expert(table_VP, tokens_T, token, lane, P, V);
    __syncwarp();
#endif
    select(my_scores, my_keys, listed + (HASH ? warp * P : 0), ids_TP, weights_TP, token, X, P, scaling);
}
