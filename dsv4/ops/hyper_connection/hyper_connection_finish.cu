// Partial mixes → pre, post, comb; the collapsed stream Σ pre_i · x_i, rounded, normalised and
// rounded again.
//
// Defines: STREAMS (M), MIXES (rows of fn; M for the head, which has no post and comb), SPLITS
// (partials per row), COUNT columns per access (8 or 1), GROUPS accesses per thread, WORKERS
// threads with columns, BLOCKS (cluster size: blocks that share one token), LEAVES (1: Sinkhorn is
// left to a later kernel, which gets its matrix as comb), RANKS and OWNERS (above 1: the tokens are
// shared, and x goes to all ranks, exchange.cuh).
//
// One cluster per token. The warp after the workers has no columns: in rank 0 it computes post and
// comb, whose Sinkhorn iterations take longer than everything else, beside the others.
#include "cluster.cuh"
#include "columns.cuh"
#include "exchange.cuh"
#include "sinkhorn.cuh"

#ifndef LEAVES
#define LEAVES 0
#endif

constexpr bool HEAD = MIXES == STREAMS;

// What a lane of the last warp needs of the parameters: those of its post and of its row of comb.
struct SideParameters {
    float post_base, post_scale, comb_base[STREAMS], comb_scale;
};

__device__ __forceinline__ float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

constexpr int WARPS = WORKERS / WARP + 1;
constexpr int ROWS = (MIXES + WARPS) / WARPS;  // of MIXES + 1, per warp
constexpr int LOADS = (SPLITS + WARP - 1) / WARP;

struct Partials {
    float values[ROWS][LOADS];
};

__device__ __forceinline__ void load_partials(Partials& out, const float* partials) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int row = warp + r * WARPS;
#pragma unroll
        for (int s = 0; s < LOADS; s++) {
            const int split = s * WARP + lane;
            out.values[r][s] =
                row <= MIXES && split < SPLITS ? partials[row * SPLITS + split] : 0.0f;
        }
    }
}

// sums[row] = Σ over the splits, in a fixed order.
__device__ __forceinline__ void add_partials(const Partials& in, float* sums) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = in.values[r][0];
#pragma unroll
        for (int s = 1; s < LOADS; s++) sum += in.values[r][s];
        sum = warp_sum(sum);
        if (lane == 0 && warp + r * WARPS <= MIXES) sums[warp + r * WARPS] = sum;
    }
}

__device__ __forceinline__ void worker_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
}

extern "C" __global__ void __launch_bounds__(WORKERS + WARP)
    hc_finish(const bf16* streams, const float* partials, const float* base, const float* scale,
              const float* norm_weight, bf16* x, float* post, float* comb, const int64* peers,
              int owner, int tokens, int width, float norm_eps, float hc_eps, int iterations) {
    __shared__ float sums[MIXES + 1];
    __shared__ float warp_squares[WARP];
    __shared__ float rows[STREAMS][STREAMS];
    __shared__ float block_squares[BLOCKS];
    __shared__ uint64 inbox;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned rank = BLOCKS > 1 ? cluster_rank() : 0;
    const int64 token = own_token(blockIdx.y, owner);
    const bool side = threadIdx.x >= WORKERS;
    float factors[GROUPS][COUNT];
    int at[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        at[g] = ((g * BLOCKS + int(rank)) * WORKERS + int(threadIdx.x)) * COUNT;
        if (side || at[g] >= width) at[g] = -1;
        if (GROUPS == 1 && at[g] >= 0) fetch_constants<COUNT>(norm_weight + at[g], factors[g]);
    }
    // Lane i of every warp holds what makes pre_i.
    const int own = lane < STREAMS ? lane : 0;
    const float own_base = fetch_constant(base + own);
    const float own_scale = fetch_constant(scale);
    SideParameters parameters;
    if (!HEAD && side) {
        parameters.post_base = fetch_constant(base + STREAMS + own);
        parameters.post_scale = fetch_constant(scale + 1);
        parameters.comb_scale = fetch_constant(scale + 2);
#pragma unroll
        for (int k = 0; k < STREAMS; k++)
            parameters.comb_base[k] = fetch_constant(base + (2 + own) * STREAMS + k);
    }
    if constexpr (BLOCKS > 1) cluster_start(&inbox, 1);
    pdl_launch();
    pdl_wait();
    if (OWNERS > 1 && token >= tokens) return;
    // What everything waits for is asked for first.
    Partials parts;
    load_partials(parts, partials + token * (MIXES + 1) * SPLITS);
    Columns<COUNT> stream[GROUPS][STREAMS];
    const bf16* token_streams = streams + token * STREAMS * width;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < STREAMS; i++)
            stream[g][i] =
                at[g] >= 0 ? load_columns<COUNT>(token_streams + unsigned(i * width + at[g]))
                           : Columns<COUNT>{};
    }
    // mixes = partials[token].sum(-1); rms = rsqrt(mixes[-1] / (M * D) + norm_eps)
    add_partials(parts, sums);
    __syncthreads();
    const float rms = rsqrtf(sums[MIXES] / (STREAMS * width) + norm_eps);
    if constexpr (BLOCKS > 1) cluster_started();
    if (side) {
        if constexpr (HEAD) return;
        if (rank > 0) return;
        // post = 2 * sigmoid(mixes[M : 2 * M] * rms * scale[1] + base[M : 2 * M])
        const float mix =
            fmaf(sums[STREAMS + own] * rms, parameters.post_scale, parameters.post_base);
        if (lane < STREAMS) post[token * STREAMS + lane] = 2.0f * sigmoid(mix);
        // kernel_MM = softmax(mixes[2 * M :].view(M, M) * rms * scale[2] + base[2 * M :], -1) + eps
        float row[STREAMS], largest = -3.4e38f, total = 0.0f;
#pragma unroll
        for (int k = 0; k < STREAMS; k++) {
            row[k] = fmaf(sums[(2 + own) * STREAMS + k] * rms, parameters.comb_scale,
                          parameters.comb_base[k]);
            largest = fmaxf(largest, row[k]);
        }
#pragma unroll
        for (int k = 0; k < STREAMS; k++) total += row[k] = expf(row[k] - largest);
#pragma unroll
        for (int k = 0; k < STREAMS; k++) row[k] = row[k] / total + hc_eps;
        float* own_comb = comb + token * STREAMS * STREAMS;
        if constexpr (LEAVES) {
#pragma unroll
            for (int k = 0; k < STREAMS; k++)
                if (lane < STREAMS) own_comb[lane * STREAMS + k] = row[k];
        } else {
#pragma unroll
            for (int k = 0; k < STREAMS; k++) rows[own][k] = row[k];
            __syncwarp();
            float balanced[STREAMS][STREAMS];
            fill(balanced, [&](int j, int k) { return rows[j][k]; });
            sinkhorn(balanced, hc_eps, iterations);
            store_comb(balanced, own_comb);
        }
        return;
    }
    // pre = sigmoid(mixes[:M] * rms * scale[0] + base[:M]) + hc_eps
    const float own_pre = sigmoid(fmaf(sums[own] * rms, own_scale, own_base)) + hc_eps;
    float pre[STREAMS];
#pragma unroll
    for (int i = 0; i < STREAMS; i++) pre[i] = __shfl_sync(~0u, own_pre, i);
    // collapsed_D = (pre_M[:, None] * x_MD).sum(0)
    Columns<COUNT> collapsed[GROUPS];
    float squares = 0.0f;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float values[COUNT];
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            values[c] = pre[0] * column(stream[g][0], c);
#pragma unroll
            for (int i = 1; i < STREAMS; i++)
                values[c] = fmaf(pre[i], column(stream[g][i], c), values[c]);
        }
        collapsed[g] = round_columns(values);
#pragma unroll
        for (int c = 0; c < COUNT; c++)
            squares = fmaf(column(collapsed[g], c), column(collapsed[g], c), squares);
    }
    // x_D = rms_norm(collapsed_D, norm_weight)
    squares = warp_sum(squares);
    if (lane == 0) warp_squares[warp] = squares;
    worker_barrier();
    squares = warp_sum(lane < WORKERS / WARP ? warp_squares[lane] : 0.0f);
    if constexpr (BLOCKS > 1) {
        if (threadIdx.x == 0) expect_mail(&inbox, sizeof(block_squares));
        if (threadIdx.x < BLOCKS) send(block_squares + rank, &inbox, threadIdx.x, squares);
        wait_mail(&inbox, 0);
        squares = 0.0f;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) squares += block_squares[b];
    }
    const float inverse = rsqrtf(squares / width + norm_eps);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        if (at[g] < 0) continue;
        // Long rows need the registers; short ones had them before the wait.
        if (GROUPS > 1) load_constants<COUNT>(norm_weight + at[g], factors[g]);
        float values[COUNT];
#pragma unroll
        for (int c = 0; c < COUNT; c++)
            values[c] = column(collapsed[g], c) * inverse * factors[g][c];
        const Columns<COUNT> rounded = round_columns(values);
#if OWNERS > 1
#pragma unroll
        for (int r = 0; r < RANKS; r++)
            store_columns(reinterpret_cast<bf16*>(peers[INPUTS + r]) + token * width + at[g],
                          rounded);
#else
        store_columns(x + token * width + at[g], rounded);
#endif
    }
}
