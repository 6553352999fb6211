// Values on their way between blocks of a launch.
#pragma once
#include "common.cuh"

// A value on its way between blocks, with the number of the launch in the high half: one that has
// arrived says so itself, and nothing has to be reset. Launches that share words have different
// numbers, none is 0.
using NumberedWord = unsigned long long;

__device__ __forceinline__ NumberedWord numbered(unsigned launch, float value) {
    return (unsigned long long)launch << 32 | __float_as_uint(value);
}

__device__ __forceinline__ void store_word(NumberedWord* to, NumberedWord word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

__device__ __forceinline__ NumberedWord load_word(const NumberedWord* from) {
    NumberedWord word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}
