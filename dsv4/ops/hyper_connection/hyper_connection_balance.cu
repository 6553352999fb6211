// comb of a seam whose hc_finish has left it, for ops that do not make it themselves. One block of
// a warp for each token. Defines: STREAMS (M).
#include "sinkhorn.cuh"

extern "C" __global__ void __launch_bounds__(WARP)
    hc_balance(const float* unbalanced, float* comb, float hc_eps, int iterations) {
    const int64 first = blockIdx.x * STREAMS * STREAMS;
    pdl_launch();
    pdl_wait();
    float own[STREAMS][STREAMS];
    fill(own, [&](int j, int k) { return unbalanced[first + j * STREAMS + k]; });
    sinkhorn(own, hc_eps, iterations);
    store_comb(own, comb + first);
}
