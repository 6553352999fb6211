// The inner loop of prefill_gemm.cuh by wgmma: one warpgroup multiplies m64 (four consecutive row
// tiles, one per warp, in registers) by 8 * BLOCKS tokens, whose rows lie in shared memory with the
// 128-byte swizzle.
#pragma once

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define ACC4(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define ACC16(j) ACC4(j), ACC4(j + 1), ACC4(j + 2), ACC4(j + 3)
#define REGS4 "%0, %1, %2, %3"
#define REGS8 REGS4 ", %4, %5, %6, %7"
#define REGS16 REGS8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGS24 REGS16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REGS32 \
    REGS16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGS48 \
    REGS32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGS56 REGS48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REGS64 REGS56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define REGS72 REGS64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define REGS104                                                                            \
    REGS72 ", %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86"   \
           ", %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101" \
           ", %102, %103"
#define REGS128                                                                                 \
    REGS104 ", %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116"    \
            ", %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_CASE(N, REGS, A0, A1, A2, A3, B, ...)                                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, {%" #A0 \
                 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"                       \
                 : __VA_ARGS__                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <int BLOCKS>
__device__ __forceinline__ void wgmma(float (&c)[BLOCKS][4], const u32 (&a)[4],
                                      unsigned long long b) {
    if constexpr (BLOCKS == 1) WGMMA_CASE(8, REGS4, 4, 5, 6, 7, 8, ACC4(0));
    if constexpr (BLOCKS == 2) WGMMA_CASE(16, REGS8, 8, 9, 10, 11, 12, ACC4(0), ACC4(1));
    if constexpr (BLOCKS == 4) WGMMA_CASE(32, REGS16, 16, 17, 18, 19, 20, ACC16(0));
    if constexpr (BLOCKS == 6)
        WGMMA_CASE(48, REGS24, 24, 25, 26, 27, 28, ACC16(0), ACC4(4), ACC4(5));
    if constexpr (BLOCKS == 8) WGMMA_CASE(64, REGS32, 32, 33, 34, 35, 36, ACC16(0), ACC16(4));
    if constexpr (BLOCKS == 12)
        WGMMA_CASE(96, REGS48, 48, 49, 50, 51, 52, ACC16(0), ACC16(4), ACC16(8));
    if constexpr (BLOCKS == 14)
        WGMMA_CASE(112, REGS56, 56, 57, 58, 59, 60, ACC16(0), ACC16(4), ACC16(8), ACC4(12),
                   ACC4(13));
    if constexpr (BLOCKS == 16)
        WGMMA_CASE(128, REGS64, 64, 65, 66, 67, 68, ACC16(0), ACC16(4), ACC16(8), ACC16(12));
    if constexpr (BLOCKS == 18)
        WGMMA_CASE(144, REGS72, 72, 73, 74, 75, 76, ACC16(0), ACC16(4), ACC16(8), ACC16(12),
                   ACC4(16), ACC4(17));
    if constexpr (BLOCKS == 26)
        WGMMA_CASE(208, REGS104, 104, 105, 106, 107, 108, ACC16(0), ACC16(4), ACC16(8), ACC16(12),
                   ACC16(16), ACC16(20), ACC4(24), ACC4(25));
    if constexpr (BLOCKS == 32)
        WGMMA_CASE(256, REGS128, 128, 129, 130, 131, 132, ACC16(0), ACC16(4), ACC16(8), ACC16(12),
                   ACC16(16), ACC16(20), ACC16(24), ACC16(28));
}

// Keeps the registers of fragments that a product in flight still reads from being reused before
// this point.
__device__ __forceinline__ void keep(u32 (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// Products of the k16 steps before the last that may still be in flight while the next step's
// weights are dequantized: as many as there are registers for.
constexpr int IN_FLIGHT = TOKENS == 64 ? 1 : 2;

// What a warp multiplies of a stage.
struct Rows {
    Weights weights[READ];

    __device__ void load(u32 buffer, int warp, int lane) {
#pragma unroll
        for (int i = 0; i < READ; i++)
            weights[i].load(buffer,
                            SHARED_TILES ? i * (ROW_TILES / 2) + warp / 2 : i * CONSUMERS + warp,
                            lane);
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
    float change[READ];
    u32 a[STEP / 16][SIDES][4] = {};
    // Waits for the next stage and dequantizes its first k16 step.
    const auto begin_stage = [&](int step) {
        stage_wait(pipe.full_barrier(), pipe.phase);
        rows.load(pipe.buffer(), warp, lane);
        if (FORMAT == FP8)
            for (int i = 0; i < READ; i++)
                rows.weights[i].low = block_scale[i].next(step, change[i]);
        rows.dequantize(a[0], 0, warp);
    };
    begin_stage(t.first_step);
    u32 previous = 0;  // barrier that frees the stage before this one
    for (int step = t.first_step; step < t.last_step; step++) {
        // K-major, swizzle 128 bytes, 1024 bytes between groups of eight tokens.
        const u64 b =
            ((u64)1 << 62) | ((u64)64 << 32) | ((u64)1 << 16) | ((pipe.buffer() & 0x3FFFF) >> 4);
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
