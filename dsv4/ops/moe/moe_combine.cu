// y[t] = shared[t] + sum over the token's experts in ascending order of routed[t, slot], in
// float32, rounded once, or a rank's part of it as it is.
#include "common.cuh"

constexpr int MAX_PER_TOKEN = MAX_EXPERTS_PER_TOKEN;

__device__ __forceinline__ void store4(bf16* to, float4 sum) {
    reinterpret_cast<__nv_bfloat162*>(to)[0] = __floats2bfloat162_rn(sum.x, sum.y);
    reinterpret_cast<__nv_bfloat162*>(to)[1] = __floats2bfloat162_rn(sum.z, sum.w);
}

__device__ __forceinline__ void store4(float* to, float4 sum) {
    *reinterpret_cast<float4*>(to) = sum;
}

__device__ __forceinline__ void store1(bf16* to, float sum) { *to = __float2bfloat16(sum); }

__device__ __forceinline__ void store1(float* to, float sum) { *to = sum; }

// shared [T, width], its rows `shared_stride` floats apart, which is `width` where that is a
// multiple of 4, routed [T * per_token, width], ids [T, per_token]; one block per token; per_token
// <= 16.
template <typename Out>
__device__ __forceinline__ void combine(const float* shared, int shared_stride, const float* routed,
                                        const int64* ids, Out* y, int width, int per_token,
                                        int experts) {
    __shared__ int64 expert[MAX_PER_TOKEN];
    __shared__ int order[MAX_PER_TOKEN];
    __shared__ int listed;
    pdl_wait();
    pdl_launch();
    const int64 token = blockIdx.x;
    if (threadIdx.x < per_token) {
        const int64 id = ids[token * per_token + threadIdx.x];
        // An id that is no expert adds nothing: it sorts behind all others.
        expert[threadIdx.x] = id >= 0 && id < experts ? id : experts;
    }
    if (threadIdx.x == 0) listed = 0;
    __syncthreads();
    if (threadIdx.x < per_token) {
        int rank = 0;
        for (int p = 0; p < per_token; p++)
            rank += expert[p] < expert[threadIdx.x] ||
                    (expert[p] == expert[threadIdx.x] && p < threadIdx.x);
        order[rank] = threadIdx.x;
        if (expert[threadIdx.x] < experts) atomicAdd(&listed, 1);
    }
    __syncthreads();
    const float* rows = routed + token * per_token * width;
    if (width % 4 == 0) {
        for (int i = threadIdx.x * 4; i < width; i += blockDim.x * 4) {
            float4 sum = *reinterpret_cast<const float4*>(shared + token * width + i);
            for (int p = 0; p < listed; p++) {
                const float4 add =
                    *reinterpret_cast<const float4*>(rows + (int64)order[p] * width + i);
                sum.x += add.x, sum.y += add.y, sum.z += add.z, sum.w += add.w;
            }
            store4(y + token * width + i, sum);
        }
        return;
    }
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = shared[token * shared_stride + i];
        for (int p = 0; p < listed; p++) sum += rows[(int64)order[p] * width + i];
        store1(y + token * width + i, sum);
    }
}

extern "C" __global__ void moe_combine(const float* shared, int shared_stride, const float* routed,
                                       const int64* ids, bf16* y, int width, int per_token,
                                       int experts) {
    combine(shared, shared_stride, routed, ids, y, width, per_token, experts);
}

extern "C" __global__ void moe_combine_partial(const float* shared, int shared_stride,
                                               const float* routed, const int64* ids, float* y,
                                               int width, int per_token, int experts) {
    combine(shared, shared_stride, routed, ids, y, width, per_token, experts);
}
