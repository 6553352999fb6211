// Rotary position embedding (dsv4/ops/rope.py), on one pair of values.
#pragma once
#include "common.cuh"

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
