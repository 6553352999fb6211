// The mean of the streams of one tap, beside those of others (dsv4/ops/stream_means/__init__.py).
#include "common.cuh"

// Tokens along y. `means` begins at the tap's columns of rows of `row` values.
extern "C" __global__ void stream_means(const bf16* taps, bf16* means, int streams, int width,
                                        int row) {
    pdl_launch();
    pdl_wait();
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    const int64 token = blockIdx.y;
    const bf16* of_token = taps + token * streams * width + column;
    float sum = 0.0f;
    for (int m = 0; m < streams; m++) sum += __bfloat162float(of_token[(int64)m * width]);
    means[token * row + column] = __float2bfloat16(sum / streams);
}
