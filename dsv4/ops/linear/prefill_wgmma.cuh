// The inner loop of prefill_gemm.cuh by wgmma: one warpgroup multiplies m64 (four consecutive row
// tiles, one per warp, in registers) by 8 * BLOCKS tokens, whose rows lie in shared memory with the
// 128-byte swizzle.
#pragma once

#include "wgmma.cuh"

#define PRODUCT(N, ...) WGMMA_PRODUCT(N, "bf16.bf16", 1, __VA_ARGS__)
template <int BLOCKS>
__device__ __forceinline__ void wgmma(float (&c)[BLOCKS][4], const u32 (&a)[4],
                                      unsigned long long b) {
    if constexpr (BLOCKS == 1) PRODUCT(8, REGS4, 4, 5, 6, 7, 8, ACC4(0));
    if constexpr (BLOCKS == 2) PRODUCT(16, REGS8, 8, 9, 10, 11, 12, ACC4(0), ACC4(1));
    if constexpr (BLOCKS == 4) PRODUCT(32, REGS16, 16, 17, 18, 19, 20, ACC16(0));
    if constexpr (BLOCKS == 6)
        PRODUCT(48, REGS24, 24, 25, 26, 27, 28, ACC16(0), ACC4(4), ACC4(5));
    if constexpr (BLOCKS == 8) PRODUCT(64, REGS32, 32, 33, 34, 35, 36, ACC16(0), ACC16(4));
    if constexpr (BLOCKS == 12)
        PRODUCT(96, REGS48, 48, 49, 50, 51, 52, ACC16(0), ACC16(4), ACC16(8));
    if constexpr (BLOCKS == 14)
        PRODUCT(112, REGS56, 56, 57, 58, 59, 60, ACC16(0), ACC16(4), ACC16(8), ACC4(12),
                   ACC4(13));
    if constexpr (BLOCKS == 16)
        PRODUCT(128, REGS64, 64, 65, 66, 67, 68, ACC16(0), ACC16(4), ACC16(8), ACC16(12));
    if constexpr (BLOCKS == 18)
        PRODUCT(144, REGS72, 72, 73, 74, 75, 76, ACC16(0), ACC16(4), ACC16(8), ACC16(12),
                   ACC4(16), ACC4(17));
    if constexpr (BLOCKS == 26)
        PRODUCT(208, REGS104, 104, 105, 106, 107, 108, ACC16(0), ACC16(4), ACC16(8), ACC16(12),
                   ACC16(16), ACC16(20), ACC4(24), ACC4(25));
    if constexpr (BLOCKS == 32)
        PRODUCT(256, REGS128, 128, 129, 130, 131, 132, ACC16(0), ACC16(4), ACC16(8), ACC16(12),
                   ACC16(16), ACC16(20), ACC16(24), ACC16(28));
}

// Products of the k16 steps before the last that may still be in flight while the next step's
// weights are dequantized: as many as there are registers for.
constexpr int IN_FLIGHT = TOKENS == 64 ? 1 : 2;

// What a warp multiplies of a stage.
struct Rows {
    Weights weights[READ];

    __device__ void start(int warp, int lane) {
#pragma unroll
        for (int i = 0; i < READ; i++)
            weights[i].start(SHARED_TILES ? i * (ROW_TILES / 2) + warp / 2 : i * CONSUMERS + warp,
                             lane);
    }

    __device__ void load(u32 buffer) {
#pragma unroll
        for (int i = 0; i < READ; i++) weights[i].load(buffer);
    }

    // The fragments of a k16 step.
    __device__ void dequantize(u32 (&a)[SIDES][4], int s, int warp) {
        if (SHARED_TILES)
#pragma unroll
            for (int i = 0; i < READ; i++)
                weights[i].dequantize_half(a[0][i], a[0][2 + i], s, warp % 2);
        else
#pragma unroll
            for (int side = 0; side < SIDES; side++) weights[side].dequantize(a[side], s);
    }
};

template <int BLOCKS>
__device__ __forceinline__ void accumulate(Accumulators<BLOCKS>& acc, float (&unit)[READ],
                                           const Gemm& g, const Tile& t, Pipe& pipe, int warp,
                                           int lane) {
    BlockScale block_scale[READ];
    if (FORMAT == FP8)
        for (int i = 0; i < READ; i++) block_scale[i].start(g, t, i, row_tile(g, t, i, warp));
    Rows rows;
    rows.start(warp, lane);
    float change[READ];
    u32 a[STEP / 16][SIDES][4] = {};
    // Waits for the next stage and dequantizes its first k16 step.
    const auto begin_stage = [&](int step) {
        pipe.wait_full();
        rows.load(pipe.buffer());
        if (FORMAT == FP8)
            for (int i = 0; i < READ; i++)
                rows.weights[i].low = block_scale[i].next(step, change[i]);
        rows.dequantize(a[0], 0, warp);
    };
    begin_stage(t.first_step);
    u32 previous = 0;  // barrier that frees the stage before this one
    for (int step = t.first_step; step < t.last_step; step++) {
        const u64 b = swizzled_rows(pipe.buffer());
        const u32 current = pipe.empty_barrier();
        pipe.advance();
        if (FORMAT == FP8 && (change[0] != 1.0f || change[READ - 1] != 1.0f)) {
            wgmma_wait<0>();
            rescale_all<BLOCKS>(acc, change);
        }
#pragma unroll
        for (int s = 0; s < STEP / 16; s++) {
            const int next = (s + 1) % (STEP / 16);
            wgmma_fence();
#pragma unroll
            for (int side = 0; side < SIDES; side++)
                wgmma<BLOCKS>(acc[side], a[s][side], b + 2 * s);
            wgmma_commit();
            wgmma_wait<IN_FLIGHT>();
#pragma unroll
            for (int side = 0; side < SIDES; side++) keep(a[next][side]);
            // Nothing of the stage before this one is in flight any more.
            if (s == IN_FLIGHT - 1 && previous && lane == 0) barrier_arrive(previous);
            if (next != 0) rows.dequantize(a[next], next, warp);
            else if (step + 1 < t.last_step) begin_stage(step + 1);
        }
        previous = current;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int s = 0; s < STEP / 16; s++)
        for (int side = 0; side < SIDES; side++) keep(a[s][side]);
    if (lane == 0) barrier_arrive(previous);
    for (int i = 0; i < READ; i++)
        unit[i] = FORMAT == FP8 ? UNIT * block_scale[i].mantissa : UNIT;
}
