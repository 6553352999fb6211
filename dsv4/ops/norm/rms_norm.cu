// Rows of x normalised by their root mean square, optionally weighted. One block per row, the row
// kept in registers. Defines: COUNT columns per access (8, or 1 for widths and addresses that do
// not allow it), GROUPS accesses per thread.
#include "columns.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(const bf16* x, const float* weight, bf16* y, int width, float eps) {
    __shared__ float scratch[WARP + 1];
    const int64 row = (int64)blockIdx.x * width;
    float factors[GROUPS][COUNT];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int first = (g * blockDim.x + threadIdx.x) * COUNT;
        if (weight && first < width) {
            fetch_constants<COUNT>(weight + first, factors[g]);
        } else {
#pragma unroll
            for (int c = 0; c < COUNT; c++) factors[g][c] = 1.0f;
        }
    }
    pdl_launch();
    pdl_wait();
    Columns<COUNT> values[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int first = (g * blockDim.x + threadIdx.x) * COUNT;
        values[g] = first < width ? load_columns<COUNT>(x + row + first) : Columns<COUNT>{};
    }
    float squares = 0.0f;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int c = 0; c < COUNT; c++)
            squares = fmaf(column(values[g], c), column(values[g], c), squares);
    }
    const float inverse = rsqrtf(block_sum(squares, scratch) / width + eps);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int first = (g * blockDim.x + threadIdx.x) * COUNT;
        if (first >= width) continue;
        float scaled[COUNT];
#pragma unroll
        for (int c = 0; c < COUNT; c++) scaled[c] = column(values[g], c) * inverse * factors[g][c];
        store_columns(y + row + first, round_columns(scaled));
    }
}
