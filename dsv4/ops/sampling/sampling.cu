// One token from float32 logits, by one cluster. Its blocks keep their parts of the logits in
// shared memory.
//
// Defines: those of logits.cuh, and SHARED_BYTES of dynamic shared memory. How the token is chosen
// is read on the device: every thread takes the same branches, and what a sampler does not ask for
// costs nothing.
#include "logits.cuh"

static_assert(2 * SLICE * sizeof(float) <= SHARED_BYTES);

// The key that decides: noise in double precision, rounded, and added as the torch op does.
__device__ __noinline__ uint64 exact_key(Draw draw, float logit, unsigned id) {
    double value = (double(noise_bits(draw.state, id)) + 0.5) / 16777216.0;
#pragma unroll 1
    for (int i = 0; i < 2; i++) value = -log(value);
    return key_of(scaled(draw, logit) + float(value), id);
}

struct Candidate {
    float logit, noisy;  // noisy from fast_noise, −∞ for none
    unsigned id;
};

__device__ __noinline__ Candidate better(Draw draw, Candidate best, float logit, unsigned id) {
    const Candidate other{logit, scaled(draw, logit) + fast_noise(noise_bits(draw.state, id)), id};
    if (fabsf(other.noisy - best.noisy) > MARGIN) return other.noisy > best.noisy ? other : best;
    return exact_key(draw, logit, id) > exact_key(draw, best.logit, best.id) ? other : best;
}

// The better of `best` and what this thread has; with TOP_P, `slice` holds distances and only
// `kept` counts.
template <bool TOP_P>
__device__ __forceinline__ Candidate best_of_slice(const Draw& draw, Candidate best,
                                                   const float* logits, const float* slice,
                                                   const Kept& kept, float min_p, unsigned top_id,
                                                   float reference) {
    // noise > bound − scaled needs 1 − u ≤ exp(scaled − bound), with 1 % for the roundings here.
    const float rate = fminf(1.0f / draw.temperature, 1e38f) * 1.44269504f;
    float offset = -1.44269504f * (reference - 2 * MARGIN);
#pragma unroll 4
    for (int n = 0; n < VALUES; n++) {
        // A thread reads back what it wrote itself.
        const int at = four_at(n / 4) + n % 4;
        const unsigned id = cluster_rank() * SLICE + at;
        float power;
        if constexpr (TOP_P) {
            const float distance = slice[at];
            if (distance >= kept.edge && (distance >= kept.next || id >= kept.limit)) continue;
            power = fmaf(distance, -1.44269504f, offset);
        } else {
            power = fmaf(slice[at] - draw.largest, rate, offset);
        }
        if (complement(noise_bits(draw.state, id)) > 1.01f * exp2f(power) || id == top_id) continue;
        const float logit = logits[id];
        // noisy[probability < min_p * probability.max()] = -inf
        if (min_p > 0.0f && expf(scaled(draw, logit)) < min_p) continue;
        best = better(draw, best, logit, id);
        offset = fminf(offset, -1.44269504f * (best.noisy - 2 * MARGIN));
    }
    return best;
}

// settings: temperature (0: the largest logit), top_p (1: all tokens), min_p (0: all tokens), top_k
// (0: all tokens).
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_token(const float* logits, int vocabulary, const float* settings, const int64* seed,
                 const int64* position, int64* token) {
    extern __shared__ float4 dynamic[];
    __shared__ Cluster cluster;
    float* slice = reinterpret_cast<float*>(dynamic);
    pdl_launch();
    cluster_start(cluster.inboxes, 2);
    pdl_wait();
    const float temperature = settings[0];
    const float top_p = settings[1];
    const float min_p = settings[2];
    const float top_k = settings[3];
    const int64 at = *position, seed_value = *seed;
    const bool greedy = temperature == 0.0f;
    const uint64 own = load_logits(logits, vocabulary, slice, !greedy);
    const unsigned state =
        noise_state(at, unsigned(seed_value), unsigned(uint64(seed_value) >> 32));
    cluster_started();  // every block has started: its shared memory may be written
    int exchange = 0;
    // top = logits.argmax()
    const uint64 top = largest_of_all(cluster, exchange++, own);
    const bool first = cluster_rank() == 0 && threadIdx.x == 0;
    Draw draw{value_of(top), temperature, state};
    // No distribution (a NaN key reads as NaN): the same for every thread of the cluster.
    if (!isfinite(draw.largest)) {
        if (first) *token = NO_TOKEN;
        return;
    }
    if (greedy) {
        if (first) *token = (long long)id_of(top);
        return;
    }
    // The most likely token is never left out: one thread enters it, and what cannot beat it needs
    // no logarithm.
    Candidate best{draw.largest, -CUDART_INF_F, 0};
    // noisy = (logits - logits.max()) / temperature + gumbel_noise(seed, position)
    const float reference = fast_noise(noise_bits(state, id_of(top)));
    if (first) best = {draw.largest, reference, id_of(top)};
    // logits[logits.argsort(descending=True, stable=True)[top_k:]] = -inf
    if (top_k > 0.0f && top_k < vocabulary)
        exchange = keep_largest(slice, top_k, cluster, exchange);
    if (top_p < 1.0f) {
        // noisy[cumulative_probability - probability >= top_p] = -inf
        const Kept kept = keep_top(draw, slice, slice + SLICE, top_p, cluster, exchange);
        best = best_of_slice<true>(draw, best, logits, slice, kept, min_p, id_of(top), reference);
    } else {
        best =
            best_of_slice<false>(draw, best, logits, slice, Kept{}, min_p, id_of(top), reference);
    }
    // token = noisy.argmax(): exactly, among what comes within MARGIN of the largest
    float most = warp_max(best.noisy);
    if (threadIdx.x % WARP == 0) cluster.block_best[threadIdx.x / WARP] = most;
    __syncthreads();
    most = warp_max(cluster.block_best[threadIdx.x % WARP]);
    uint64 key = 0;
    if (best.noisy > -CUDART_INF_F && best.noisy >= most - MARGIN)
        key = exact_key(draw, best.logit, best.id);
    key = largest_of_all(cluster, exchange, key);
    if (first) *token = (long long)id_of(key);
}
