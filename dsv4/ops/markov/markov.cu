// The logits of a draft behind the token before it (dsv4/ops/markov/__init__.py): what stands
// before and behind the product with w2.
//
// Defines: FLOAT_TABLE (1: the table w1 is float32).
#include "common.cuh"

#if FLOAT_TABLE
using Entry = float;
__device__ __forceinline__ bf16 rounded(float value) { return __float2bfloat16(value); }
#else
using Entry = bf16;
__device__ __forceinline__ bf16 rounded(bf16 value) { return value; }
#endif

// row = table[previous]; a token below 0, which a sampler gives for NaN, reads that of 0.
extern "C" __global__ void markov_row(const Entry* table, const int64* previous, bf16* row,
                                      int width) {
    pdl_launch();
    pdl_wait();
    const int64 token = *previous < 0 ? 0 : *previous;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        row[i] = rounded(table[token * width + i]);
}

// out = base + product
extern "C" __global__ void markov_add(const float* base, const float* product, float* out,
                                      int count) {
    pdl_launch();
    pdl_wait();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = base[i] + product[i];
}
