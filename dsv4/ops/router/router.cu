// Ids and weights from logits that exist, rows of `logits_stride` floats: one warp per token.
// Defines: see router.cuh.
#include "router.cuh"

constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    router_select(const float* logits_TX, int logits_stride, const float* bias_X,
                  const int64* table_VP, const int64* tokens_T, int64* ids_TP, float* weights_TP,
                  int* nan, int T, int V, float scaling) {
    constexpr int X = EXPERTS, P = EXPERTS_PER_TOKEN;
    const int lane = threadIdx.x % WARP;
    const int token = blockIdx.x * WARPS + threadIdx.x / WARP;
    float bias[PER_LANE] = {};
    if (!HASH) load_bias(bias, bias_X, X);
    pdl_wait();
    pdl_launch();
    if (token >= T) return;
    const int64 listed = HASH ? listed_expert(table_VP, __ldcg(tokens_T + token), V) : 0;
    float score[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int expert = i * WARP + lane;
        score[i] = expert < X ? log_score(__ldcg(logits_TX + int64(token) * logits_stride + expert))
                              : 0.0f;
    }
    const int64 id = choose(score, bias, listed);
    const float weight = weigh(score, id, scaling);
    if (lane < P) {
        ids_TP[int64(token) * P + lane] = id;
        weights_TP[int64(token) * P + lane] = weight;
        note_nan(nan, weight);
    }
}
