// Rows of another device's memory, which this one can read.
#include "common.cuh"

// fetched = rows, `count` times 16 bytes.
extern "C" __global__ void fetch(const uint4* rows, uint4* fetched, int count) {
    pdl_launch();
    pdl_wait();
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) fetched[at] = rows[at];
}
