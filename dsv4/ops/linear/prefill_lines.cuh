// bf16 results through shared memory, so that whole lines are written: for prefill_results.cuh.
#pragma once

constexpr int GROUP = 4 * WARP;
constexpr int GROUP_ROWS = 64;
// 32 tokens of a warpgroup, twice.
constexpr int STAGED_TOKENS = 32;
constexpr int STAGED_BYTES = STAGED_TOKENS * GROUP_ROWS * 2;
constexpr int RESULT_BYTES = CONSUMERS * WARP / GROUP * 2 * STAGED_BYTES;

// Four 8 x 8 matrices of bf16, each transposed, from the registers of a warp to shared memory; lane
// l has the address of line l % 8 of matrix l / 8.
__device__ __forceinline__ void store_transposed(u32 address, uint2 a, uint2 b) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(a.x), "r"(a.y), "r"(b.x), "r"(b.y)
        : "memory");
}

__device__ __forceinline__ void group_sync(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "n"(GROUP) : "memory");
}

// bf16 rows of stride y_stride (a multiple of 8): eight lanes write one token's 128 bytes. Writes a
// multiple of 8 rows. `pairs(j)`: of eight tokens 2t and 2t + 1, of rows g and g + 8, which are
// `offset` behind the first ones of the block. 16-byte piece c of token n waits at place
// c ^ (n % 8).
template <int BLOCKS, typename Pairs>
__device__ __forceinline__ void store_rounded(const Pairs& pairs, int offset, const Gemm& g,
                                              const Tile& t, const Output& out) {
    constexpr int PARTS = (BLOCKS + 3) / 4;
    const int thread = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
    const int lane = thread % WARP, warp = thread / WARP;
    const int row = t.row_block * ROWS_PER_BLOCK + offset + group * GROUP_ROWS + thread % 8 * 8;
    bf16* y = static_cast<bf16*>(out.y) + (int64)t.batch * g.rows + row +
              (t.first + thread / 8) * out.y_stride;
    // Lane l gives the address of token l % 8 of matrix l / 8: rows 0-7 and 8-15 of eight tokens,
    // then of the next eight.
    const int token = lane / 16 * 8 + lane % 8;
    const u32 place = token * 128 + ((2 * warp + lane / 8 % 2) ^ token % 8) * 16;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const u32 buffer = out.staged + (2 * group + part % 2) * STAGED_BYTES;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int j = 4 * part + 2 * half;
            if (j < BLOCKS)
                store_transposed(buffer + half * 16 * 128 + place, pairs(j),
                                 pairs(min(j + 1, BLOCKS - 1)));
        }
        group_sync(group);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int first = part * STAGED_TOKENS + half * 16, waiting = half * 16 + thread / 8;
            const uint4 line =
                load_shared16(buffer + waiting * 128 + ((thread % 8) ^ waiting % 8) * 16);
            if (first + thread / 8 < t.count && row < g.rows)
                *reinterpret_cast<uint4*>(y + first * out.y_stride) = line;
        }
    }
    // The next results begin with the first buffer.
    if (PARTS % 2) group_sync(group);
}

// The same where two warps share row tiles, so that a warpgroup has 32 rows: four lanes write one
// token's 64 bytes. `pair(j)`: of the warp's eight rows. Piece c of token n waits at place
// c ^ (n / 2 % 4).
template <int BLOCKS, typename Pair>
__device__ __forceinline__ void store_shared(const Pair& pair, const Gemm& g, const Tile& t,
                                             const Output& out) {
    constexpr int PARTS = (BLOCKS + 3) / 4, LINE = GROUP_ROWS;  // bytes of 32 rows
    const int thread = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
    const int lane = thread % WARP, warp = thread / WARP;
    const int row = t.row_block * ROWS_PER_BLOCK + group * (GROUP_ROWS / 2) + thread % 4 * 8;
    bf16* y = static_cast<bf16*>(out.y) + row + (t.first + thread / 4) * out.y_stride;
    // Lane l gives the address of token l of 32.
    const u32 place = lane * LINE + (warp ^ lane / 2 % 4) * 16;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const u32 buffer = out.staged + (2 * group + part % 2) * STAGED_BYTES;
        u32 pairs[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (4 * part + i < BLOCKS) pairs[i] = pair(4 * part + i);
        store_transposed(buffer + place, make_uint2(pairs[0], pairs[1]),
                         make_uint2(pairs[2], pairs[3]));
        group_sync(group);
        const int waiting = thread / 4;
        const uint4 line = load_shared16(buffer + waiting * LINE +
                                         ((thread % 4) ^ waiting / 2 % 4) * 16);
        const int first = part * STAGED_TOKENS;
        if (first + waiting < t.count && row < g.rows)
            *reinterpret_cast<uint4*>(y + first * out.y_stride) = line;
    }
    // The next results begin with the first buffer.
    if (PARTS % 2) group_sync(group);
}
