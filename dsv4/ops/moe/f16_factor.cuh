// Powers of two that bring values into the range of f16.
#pragma once
#include "weight_tile.cuh"

// The power of two that brings `bound` into [2^14, 2^15).
__device__ __forceinline__ float f16_factor(float bound) {
    return __uint_as_float(activation_factor(bound));
}

__device__ __forceinline__ float inverse_power(float power_of_two) {
    return __uint_as_float((254u << 23) - __float_as_uint(power_of_two));
}
