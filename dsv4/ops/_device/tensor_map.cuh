// Boxes of a tensor that TMA copies to shared memory (dsv4/launch/boxes.py).
#pragma once
#include "common.cuh"

// What the driver encodes: a kernel gets it as a `const __grid_constant__` argument.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// The arrivals of a phase are complete when its bytes have come, too. Counts as one arrival.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// The box from these columns, rows and matrices on; what lies outside the tensor becomes zeros.
__device__ __forceinline__ void copy_box(unsigned target, const TensorMap& map, int column, int row,
                                         int matrix, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3, %4}], [%5];" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(matrix), "r"(barrier)
        : "memory");
}
