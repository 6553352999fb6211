// Index queries: rotary embedding, rounded, then the Hadamard rotation (dsv4/ops/indexer.py). One warp per head; lane l
// holds the PER_LANE consecutive values from l · PER_LANE on. WIDTH is a power of two.
#include "rope.cuh"

#ifndef WIDTH
#define WIDTH 128
#endif

constexpr int PER_LANE = WIDTH > WARP ? WIDTH / WARP : 1, LANES = WIDTH / PER_LANE;

// Butterflies in the order of dsv4/ops/hadamard.py: distance 1 first.
__device__ __forceinline__ void hadamard(float (&values)[PER_LANE]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int step = 1; step < PER_LANE; step *= 2) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            if (i & step) continue;
            const float a = values[i], b = values[i + step];
            values[i] = a + b, values[i + step] = a - b;
        }
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const float other = __shfl_xor_sync(~0u, values[i], step);
            values[i] = lane & step ? other - values[i] : values[i] + other;
        }
    }
}

// Block (x, y): token y, `heads_per_block` heads from x · heads_per_block on.
extern "C" __global__ void __launch_bounds__(256) index_query(const bf16* q, const int64* positions, const float* inv_freq, bf16* out,
                                                              int heads, int heads_per_block, int rope_width, float normaliser) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP, first = lane * PER_LANE;
    const int plain = WIDTH - rope_width;
    float frequency[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) frequency[i] = first + i >= plain && first + i < WIDTH ? inv_freq[(first + i - plain) / 2] : 0.0f;
    pdl_launch();
    pdl_wait();
    const int64 position = positions[blockIdx.y];
    const int stop = min((int)(blockIdx.x + 1) * heads_per_block, heads);
    Turn turns[PER_LANE];
    bool turned = false;
    for (int head = blockIdx.x * heads_per_block + warp; head < stop; head += warps) {
        const int64 start = ((int64)blockIdx.y * heads + head) * WIDTH + first;
        float values[PER_LANE];
        if constexpr (PER_LANE == 4) {
            const uint2 raw = *reinterpret_cast<const uint2*>(q + start);
            values[0] = __uint_as_float(raw.x << 16), values[1] = __uint_as_float(raw.x & 0xFFFF0000u);
            values[2] = __uint_as_float(raw.y << 16), values[3] = __uint_as_float(raw.y & 0xFFFF0000u);
        } else {
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) values[i] = first + i < WIDTH ? __bfloat162float(q[start + i]) : 0.0f;
        }
        if (!turned) {
            // The same for every head of the token; computed while the first row is on its way.
            turned = true;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                if (PER_LANE > 1 && i % 2) turns[i] = turns[i - 1];
                else if (first + i >= plain) turns[i] = rope_turn(position, frequency[i]);
            }
        }
        if constexpr (PER_LANE == 1) {
            const float other = __shfl_xor_sync(~0u, values[0], 1);
            const float2 pair = lane % 2 ? rotate(other, values[0], turns[0]) : rotate(values[0], other, turns[0]);
            if (first >= plain) values[0] = __bfloat162float(__float2bfloat16(lane % 2 ? pair.y : pair.x));
        } else {
#pragma unroll
            for (int i = 0; i < PER_LANE; i += 2) {
                if (first + i < plain) continue;
                const float2 pair = rotate(values[i], values[i + 1], turns[i]);
                values[i] = __bfloat162float(__float2bfloat16(pair.x));
                values[i + 1] = __bfloat162float(__float2bfloat16(pair.y));
            }
        }
        hadamard(values);
        if constexpr (PER_LANE == 4) {
            const __nv_bfloat162 low = __floats2bfloat162_rn(values[0] * normaliser, values[1] * normaliser);
            const __nv_bfloat162 high = __floats2bfloat162_rn(values[2] * normaliser, values[3] * normaliser);
            *reinterpret_cast<uint2*>(out + start) =
                make_uint2(*reinterpret_cast<const unsigned*>(&low), *reinterpret_cast<const unsigned*>(&high));
        } else {
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                if (first + i < WIDTH) out[start + i] = __float2bfloat16(values[i] * normaliser);
            }
        }
    }
}
