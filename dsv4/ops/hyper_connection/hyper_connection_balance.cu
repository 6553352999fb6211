// comb of a seam whose hc_finish has left it. One block of a warp for each token. Defines: STREAMS
// (M).
#include "sinkhorn.cuh"

extern "C" __global__ void __launch_bounds__(WARP)
    hc_balance(const float* unbalanced, float* comb, float hc_eps, int iterations) {
    const int64 first = blockIdx.x * STREAMS * STREAMS;
    pdl_launch();
    pdl_wait();
    float kernel[STREAMS][STREAMS];
#pragma unroll
    for (int j = 0; j < STREAMS; j++)
#pragma unroll
        for (int k = 0; k < STREAMS; k++) kernel[j][k] = unbalanced[first + j * STREAMS + k];
    sinkhorn(kernel, hc_eps, iterations).store(comb + first);
}
