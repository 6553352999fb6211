// Division by a number that is known before many numbers are divided by it.
#pragma once
#include "common.cuh"

// Exact n / divisor for n · divisor < 2^32.
struct Divisor {
    unsigned reciprocal;

    __device__ __forceinline__ explicit Divisor(int divisor) {
        // 0 stands for 2^32.
        reciprocal = divisor > 1 ? 0xFFFFFFFFu / divisor + 1 : 0;
    }

    __device__ __forceinline__ int divide(int n) const {
        return reciprocal ? __umulhi(n, reciprocal) : n;
    }
};
