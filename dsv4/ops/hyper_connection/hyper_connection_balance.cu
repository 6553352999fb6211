// comb of a seam whose hc_finish has left it. One block of a warp for each token. Defines: STREAMS
// (M).
#include "sinkhorn.cuh"

extern "C" __global__ void __launch_bounds__(WARP)
    hc_balance(const float* unbalanced, float* comb, float hc_eps, int iterations) {
    const int64 first = blockIdx.x * STREAMS * STREAMS;
    pdl_launch();
    pdl_wait();
    float kernel[STREAMS][STREAMS];
    fill(kernel, [&](int j, int k) { return unbalanced[first + j * STREAMS + k]; });
    sinkhorn(kernel, hc_eps, iterations).store(comb + first);
}
