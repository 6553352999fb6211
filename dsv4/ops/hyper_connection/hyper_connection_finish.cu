// Partial mixes → pre, post, comb; the collapsed stream Σ pre_i · x_i, rounded, normalised and
// rounded again.
//
// Defines: STREAMS (M), MIXES (rows of fn; M for the head, which has no post and comb), SPLITS
// (partials per row), COUNT columns per access (8 or 1), GROUPS accesses per thread, WORKERS
// threads with columns, SIDES (warps behind them), BLOCKS (cluster size: blocks that share one
// token), LEAVES (1: Sinkhorn is left to a later kernel, which gets its matrix as comb), RANKS and
// OWNERS (above 1: the tokens are shared, and x goes to all ranks, exchange.cuh).
//
// One cluster per token. The warp after the workers has no columns: in rank 0 it computes post and
// comb, whose Sinkhorn iterations take longer than everything else, beside the others. Several such
// warps add up the mixes of post and comb, for which x then does not wait.
#include "cluster.cuh"
#include "columns.cuh"
#include "exchange.cuh"
#include "sinkhorn.cuh"

#ifndef LEAVES
#define LEAVES 0
#endif
#ifndef SIDES
#define SIDES 1
#endif

constexpr bool HEAD = MIXES == STREAMS;

// What a lane of the last warp needs of the parameters: those of its post and of its row of comb.
struct SideParameters {
    float post_base, post_scale, comb_base[STREAMS], comb_scale;
};

__device__ __forceinline__ float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

constexpr int LOADS = (SPLITS + WARP - 1) / WARP;
// Whether what every thread needs is added up apart from the rest, which is added up in rank 0.
constexpr bool APART = SIDES > 1;
// The workers and the first warp behind them.
constexpr int WORKER_WARPS = WORKERS / WARP, WARPS = WORKER_WARPS + 1;
// Sums by number, first those that every thread needs: with APART those of the squares and of pre.
constexpr int ALL = MIXES + 1, FIRST = APART ? STREAMS + 1 : ALL;

// Partials of sums `number`, `number` + STEP, ... before END.
template <int BEGIN, int END, int STEP>
struct Partials {
    static constexpr int ROWS = (END - BEGIN + STEP - 1) / STEP;
    float values[ROWS > 0 ? ROWS : 1][LOADS];

    static __device__ __forceinline__ int row_of(int number) {
        if (!APART) return number;
        return number == 0 ? MIXES : number - 1;
    }

    __device__ __forceinline__ void load(const float* partials, int number) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int row = row_of(number + r * STEP);
#pragma unroll
            for (int s = 0; s < LOADS; s++) {
                const int split = s * WARP + lane;
                const bool is_there = number + r * STEP < END && split < SPLITS;
                values[r][s] = is_there ? partials[row * SPLITS + split] : 0.0f;
            }
        }
    }

    // sums[row] = Σ over the splits, in a fixed order.
    __device__ __forceinline__ void add(float* sums, int number) const {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float sum = values[r][0];
#pragma unroll
            for (int s = 1; s < LOADS; s++) sum += values[r][s];
            sum = warp_sum(sum);
            if (threadIdx.x % WARP == 0 && number + r * STEP < END)
                sums[row_of(number + r * STEP)] = sum;
        }
    }
};

// Sums of squares by block and warp of workers.
using Squares = float[BLOCKS][WORKER_WARPS];

// Over the warps of a block in the order of warp_sum, then over the blocks.
__device__ __forceinline__ float sum_squares(const Squares& squares) {
    constexpr int PLACES = power_of_two(WORKER_WARPS);
    float sum = 0.0f;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        float values[PLACES];
#pragma unroll
        for (int i = 0; i < PLACES; i++) values[i] = i < WORKER_WARPS ? squares[block][i] : 0.0f;
#pragma unroll
        for (int offset = PLACES / 2; offset > 0; offset /= 2) {
#pragma unroll
            for (int i = 0; i < offset; i++) values[i] += values[i + offset];
        }
        sum += values[0];
    }
    return sum;
}

template <int BARRIER, int THREADS>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}

extern "C" __global__ void __launch_bounds__(WORKERS + SIDES * WARP)
    hc_finish(const bf16* streams, const float* partials, const float* base, const float* scale,
              const float* norm_weight, bf16* x, float* post, float* comb, const int64* peers,
              int owner, int tokens, int width, float norm_eps, float hc_eps, int iterations) {
    __shared__ float sums[MIXES + 1];
    __shared__ __align__(16) Squares squares;
    __shared__ float rows[STREAMS][STREAMS];
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
    if constexpr (BLOCKS > 1) {
        cluster_start(&inbox, 1);
        if (threadIdx.x == 0) expect_mail(&inbox, sizeof(squares));
    }
    pdl_launch();
    pdl_wait();
    if (OWNERS > 1 && token >= tokens) return;
    // What everything waits for is asked for first.
    const int others = FIRST + warp - WORKER_WARPS;
    Partials<0, FIRST, WARPS> first_partials;
    Partials<FIRST, ALL, SIDES> other_partials;
    partials += token * ALL * SPLITS;
    if (!APART || warp < WARPS) first_partials.load(partials, warp);
    if (side && rank == 0) other_partials.load(partials, others);
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
    if (!APART || warp < WARPS) first_partials.add(sums, warp);
    if (!APART) __syncthreads();
    else if (warp < WARPS) meet<2, WARPS * WARP>();
    if constexpr (BLOCKS > 1) cluster_started();
    if (side) {
        if constexpr (HEAD) return;
        if (rank > 0) return;
        if (APART) {
            other_partials.add(sums, others);
            meet<3, SIDES * WARP>();
            if (warp >= WARPS) return;
        }
    }
    const float rms = rsqrtf(sums[MIXES] / (STREAMS * width) + norm_eps);
    if (side) {
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
    float own_squares = 0.0f;
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
            own_squares = fmaf(column(collapsed[g], c), column(collapsed[g], c), own_squares);
    }
    // x_D = rms_norm(collapsed_D, norm_weight)
    own_squares = warp_sum(own_squares);
    float all_squares;
    if constexpr (BLOCKS > 1) {
        if (lane < BLOCKS) send(&squares[rank][warp], &inbox, lane, own_squares);
        wait_mail(&inbox, 0);
        all_squares = sum_squares(squares);
    } else {
        if (lane == 0) squares[0][warp] = own_squares;
        meet<1, WORKERS>();
        all_squares = warp_sum(lane < WORKER_WARPS ? squares[0][lane] : 0.0f);
    }
    const float inverse = rsqrtf(all_squares / width + norm_eps);
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
