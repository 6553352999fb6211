// Which drafts of a block stay (dsv4/ops/acceptance/__init__.py).
//
// judge_drafts: one cluster for every draft, which keeps the main model's distribution and the
// draft's in shared memory. Defines: those of logits.cuh, and SHARED_BYTES of dynamic shared
// memory. Probabilities are float32.
#include "logits.cuh"

static_assert(3 * SLICE * sizeof(float) <= SHARED_BYTES);
constexpr long long KEPT = -2;
// The noise that decides on drafts, and the noise that draws in the place of one that does not
// stay: the seeds of the torch functions accepting_seed and remaining_seed.
constexpr uint64 ACCEPTING = 0x5F0E3A9177C421D5ull;
constexpr uint64 REMAINING = 0x29B1D0C64E8F6A37ull;

// `slice` holds logits of which `top` is the largest, and then exp((logit − top) / temperature), 0
// for what top-k, top-p and min-p leave out. Returns the sum, and in `at_draft` the value of
// `draft`.
__device__ __noinline__ float weigh(float* slice, float* work, float top, const float* settings,
                                    int vocabulary, int64 draft, Cluster& cluster, int& exchange,
                                    float& at_draft) {
    const Draw draw{top, settings[0], 0};
    const float top_p = settings[1], min_p = settings[2], top_k = settings[3];
    if (top_k > 0.0f && top_k < vocabulary)
        exchange = keep_largest(slice, top_k, cluster, exchange);
    const bool restricted = top_p < 1.0f;
    Kept kept{};
    if (restricted) kept = keep_top(draw, slice, work, top_p, cluster, exchange);
    float whole = 0.0f, own = 0.0f;
#pragma unroll 1
    for (int n = 0; n < VALUES; n++) {
        const int at = n * THREADS + threadIdx.x;
        const unsigned id = cluster_rank() * SLICE + at;
        float weight;
        if (restricted) {
            const float distance = slice[at];
            const bool cut = distance >= kept.edge && (distance >= kept.next || id >= kept.limit);
            weight = cut ? 0.0f : work[at];
        } else {
            weight = expf(scaled(draw, slice[at]));
        }
        if (weight < min_p) weight = 0.0f;
        slice[at] = weight;
        whole += weight;
        if (id == draft) own = weight;
    }
    const Sums sums = sums_of_all(cluster, exchange++, {whole, own});
    at_draft = sums.of[1];
    return sums.of[0];
}

// From 0 to 1, the same hash as the noise of token 0.
__device__ __noinline__ double uniform_at(unsigned state) {
    double value = (double(noise_bits(state, 0)) + 0.5) / 16777216.0;
#pragma unroll 1
    for (int i = 0; i < 2; i++) value = -log(value);
    return exp(-exp(-double(float(value))));
}

__device__ __noinline__ uint64 exact_key(unsigned state, float rest, unsigned id) {
    double value = (double(noise_bits(state, id)) + 0.5) / 16777216.0;
#pragma unroll 1
    for (int i = 0; i < 2; i++) value = -log(value);
    return key_of(float(log(double(rest)) + double(float(value))), id);
}

// The id with the largest log(rest) + noise, rest being what is left of p (`mine`, times `scale`)
// without q (`other`, times `other_scale`; scale 0: all of p).
__device__ __noinline__ uint64 draw_rest(const float* mine, float scale, const float* other,
                                         float other_scale, unsigned state, Cluster& cluster,
                                         int exchange) {
    float best = -CUDART_INF_F, best_rest = 0.0f;
    unsigned best_id = 0;
#pragma unroll 1
    for (int n = 0; n < VALUES; n++) {
        const int at = n * THREADS + threadIdx.x;
        const unsigned id = cluster_rank() * SLICE + at;
        const float rest =
            other_scale > 0.0f ? mine[at] * scale - other[at] * other_scale : mine[at] * scale;
        if (!(rest > 0.0f)) continue;
        const float noisy = __logf(rest) + fast_noise(noise_bits(state, id));
        if (noisy < best - MARGIN) continue;
        if (noisy <= best + MARGIN &&
            exact_key(state, rest, id) <= exact_key(state, best_rest, best_id))
            continue;
        best = noisy, best_rest = rest, best_id = id;
    }
    float most = warp_max(best);
    if (threadIdx.x % WARP == 0) cluster.block_best[threadIdx.x / WARP] = most;
    __syncthreads();
    most = warp_max(cluster.block_best[threadIdx.x % WARP]);
    uint64 key = 0;
    if (best > -CUDART_INF_F && best >= most - MARGIN) key = exact_key(state, best_rest, best_id);
    return largest_of_all(cluster, exchange, key);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    judge_drafts(const float* logits, const float* draft_logits, const int64* drafts,
                 int vocabulary, int count, const float* settings, const int64* seed,
                 const int64* position, int64* replacements) {
    extern __shared__ float4 dynamic[];
    __shared__ Cluster cluster;
    __shared__ int stays;
    float* target = reinterpret_cast<float*>(dynamic);
    float* proposed = target + SLICE;
    float* work = proposed + SLICE;
    const int row = blockIdx.x / BLOCKS;
    pdl_launch();
    cluster_start(cluster.inboxes, 2);
    pdl_wait();
    const bool greedy = settings[0] == 0.0f;
    const int64 draft = drafts[row];
    // Behind the step: the position of the token behind all drafts.
    const int64 at = *position - count + row;
    const uint64 plain_seed = uint64(*seed);
    const auto noise_of = [&](uint64 of) {
        return noise_state(at, unsigned(of), unsigned(of >> 32));
    };
    const uint64 own = load_logits(logits + int64(row) * vocabulary, vocabulary, target, !greedy);
    cluster_started();  // every block has started: its shared memory may be written
    int exchange = 0;
    const uint64 top = largest_of_all(cluster, exchange++, own);
    const bool first = cluster_rank() == 0 && threadIdx.x == 0;
    if (!isfinite(value_of(top))) {
        if (first) replacements[row] = NO_TOKEN;
        return;
    }
    if (greedy) {
        const int64 token = id_of(top);
        if (first) replacements[row] = token == draft ? KEPT : token;
        return;
    }
    float p = 0.0f, q = 0.0f;
    const float p_sum =
        weigh(target, work, value_of(top), settings, vocabulary, draft, cluster, exchange, p);
    if (draft < 0) {  // the drafts have ended before this row: a draw from p
        const uint64 key =
            draw_rest(target, 1.0f, nullptr, 0.0f, noise_of(plain_seed), cluster, exchange);
        if (first) replacements[row] = id_of(key);
        return;
    }
    const uint64 draft_own =
        load_logits(draft_logits + int64(row) * vocabulary, vocabulary, proposed, true);
    const uint64 draft_top = largest_of_all(cluster, exchange++, draft_own);
    const float q_sum = weigh(proposed, work, value_of(draft_top), settings, vocabulary, draft,
                              cluster, exchange, q);
    if (threadIdx.x == 0) {
        const double share = double(q) / double(q_sum);
        stays = uniform_at(noise_of(plain_seed ^ ACCEPTING)) * share < double(p) / double(p_sum);
    }
    __syncthreads();
    if (stays) {
        if (first) replacements[row] = KEPT;
        return;
    }
    const float p_scale = 1.0f / p_sum;
    float q_scale = 1.0f / q_sum;
    float rest = 0.0f;
#pragma unroll 1
    for (int n = 0; n < VALUES; n++) {
        const int slot = n * THREADS + threadIdx.x;
        rest += fmaxf(target[slot] * p_scale - proposed[slot] * q_scale, 0.0f);
    }
    rest = sums_of_all(cluster, exchange++, {rest}).of[0];
    // Where p is q but for a rounding, nothing is left to draw from.
    if (rest == 0.0f) q_scale = 0.0f;
    const uint64 key = draw_rest(target, p_scale, proposed, q_scale,
                                 noise_of(plain_seed ^ REMAINING), cluster, exchange);
    if (first) replacements[row] = id_of(key);
}
