// Rotary position embedding (dsv4/ops/rope/__init__.py), on one pair of values.
#pragma once
#include "columns.cuh"

struct Turn {
    float cosine, sine;
};

// The angle is one float32 product. Angles reach 1e6 rad, where the fast intrinsics are useless.
__device__ __forceinline__ Turn rope_turn(int64 position, float inv_freq) {
    Turn turn;
    sincosf(__fmul_rn((float)position, inv_freq), &turn.sine, &turn.cosine);
    return turn;
}

// The inverse rotation.
__device__ __forceinline__ Turn conjugate(Turn turn) { return {turn.cosine, -turn.sine}; }

// (a, b) turned in float32. Products and sums are rounded one by one, as the torch op does.
__device__ __forceinline__ float2 rotate(float a, float b, Turn turn) {
    return make_float2(__fsub_rn(__fmul_rn(a, turn.cosine), __fmul_rn(b, turn.sine)),
                       __fadd_rn(__fmul_rn(a, turn.sine), __fmul_rn(b, turn.cosine)));
}

// All turns of one position, each computed by one lane of the warp: lane l has pairs l, l + 32, ...
template <int Pairs>
struct WarpTurns {
    static constexpr int PER_LANE = (Pairs + WARP - 1) / WARP;
    float frequencies[PER_LANE];
    Turn turns[PER_LANE];

    // Constants only.
    __device__ __forceinline__ void fetch(const float* inv_freq) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int pair = threadIdx.x % WARP + i * WARP;
            frequencies[i] = pair < Pairs ? fetch_constant(inv_freq + pair) : 0.0f;
        }
    }

    __device__ __forceinline__ void move_to(int64 position) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) turns[i] = rope_turn(position, frequencies[i]);
    }

    // Every lane of the warp asks, each for a pair of its own.
    __device__ __forceinline__ Turn of(int pair) const {
        Turn found{1.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const float cosine = __shfl_sync(~0u, turns[i].cosine, pair % WARP);
            const float sine = __shfl_sync(~0u, turns[i].sine, pair % WARP);
            if (PER_LANE == 1 || pair / WARP == i) found = {cosine, sine};
        }
        return found;
    }
};
