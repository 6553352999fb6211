// wgmma: products of a warpgroup, whose first operand lies in registers or in shared memory and the
// second in shared memory, in rows of 128 bytes with the swizzle of 128 bytes.
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

// Rows of 128 bytes along the summed dimension, from a 1024-byte border on: groups of eight rows
// follow each other. A step of 32 bytes along them adds 2.
__device__ __forceinline__ unsigned long long swizzled_rows(unsigned address) {
    return 1ull << 62 | 64ull << 32 | 1ull << 16 | (address & 0x3FFFF) >> 4;
}

// Rows of 128 bytes across the summed dimension: groups of eight summed rows follow each other, and
// blocks of 64 columns are `block_bytes` apart.
__device__ __forceinline__ unsigned long long swizzled_columns(unsigned address, int block_bytes) {
    return 1ull << 62 | 64ull << 32 | (unsigned long long)(block_bytes >> 4) << 16 |
           (address & 0x3FFFF) >> 4;
}

// The operands of sums c[..][4].
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
// m64nNk16 of TYPES with a[4] in registers; ADDS 0: overwrites the sums. A0 to B: the numbers of
// the operands behind the sums.
#define WGMMA_PRODUCT(N, TYPES, ADDS, REGS, A0, A1, A2, A3, B, ...)                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" REGS "}, {%" #A0 \
                 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", " #ADDS ", 1, 1, 0;"               \
                 : __VA_ARGS__                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// m64nNk16 of bfloat16 with a and b in shared memory, which replaces the sums unless `adds`.
// TURN_A, TURN_B: 1 where the operand's rows are across the summed dimension. A, B, ADDS: the
// numbers of the operands behind the sums.
#define WGMMA_SHARED(N, TURN_A, TURN_B, REGS, A, B, ADDS, ...)                              \
    asm volatile(                                                                           \
        "{\n"                                                                               \
        ".reg .pred p;\n"                                                                   \
        "setp.ne.b32 p, %" #ADDS                                                            \
        ", 0;\n"                                                                            \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, %" #A ", %" #B \
        ", p, 1, 1, " #TURN_A ", " #TURN_B ";\n}"                                           \
        : __VA_ARGS__                                                                       \
        : "l"(a), "l"(b), "r"(adds))

// Keeps the registers of fragments that a product in flight still reads from being reused before
// this point.
__device__ __forceinline__ void keep(unsigned (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}
