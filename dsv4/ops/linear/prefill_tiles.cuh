// What the GEMMs of many tokens share: tiles of the result, the ring of stages, weights dequantized
// to bf16 in registers, and the inner loop.
//
// The weights are the A operand (rows of W along M, in the packed fragment order), tokens are N.
// Warp w of a block's consumers owns row tile w, and with two sides row tile CONSUMERS + w.
#pragma once
#include "mma.cuh"
#include "ptx.cuh"

#define NVFP4 FORMAT_NVFP4
#define MXFP4 FORMAT_MXFP4
#define FP8 FORMAT_FP8
#define BF16 FORMAT_BF16
#define MODE_LINEAR 0
#define MODE_GATE_UP 1
#define MODE_DOWN 2
#ifndef FORMAT
#define FORMAT NVFP4
#endif
#ifndef MODE
#define MODE MODE_LINEAR
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef OUT_FLOAT
#define OUT_FLOAT 0
#endif
#ifndef TOKENS
#define TOKENS 128  // of one tile
#endif
#ifndef CONSUMERS
#define CONSUMERS 8  // warps
#endif
#ifndef WIDE
#define WIDE 0
#endif
#ifndef SIDES
#define SIDES 2  // row tiles of a warp: gate and up, or CONSUMERS apart
#endif
#ifndef BOXES
#define BOXES 0  // copies by TMA
#endif
#ifndef LIST
#define LIST 0  // MODE_LINEAR: several matrices with the same x, row tiles one after the other
#endif
// Stages whose copies the producers have issued but not yet announced.
#ifndef LAG
#define LAG (STAGES >= 6 ? 2 : 1)
#endif

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int MOST_MATRICES = 8;
constexpr int STEP = 64;  // columns of one pipeline stage: 128-byte rows of x
// Warps: one warpgroup, which gives most of its registers to the consumers
constexpr int PRODUCERS = 4;
constexpr int THREADS = (CONSUMERS + PRODUCERS) * WARP;
// 384 threads start with 168 registers each, 512 with 128: the sums are the same.
constexpr int PRODUCER_REGISTERS = !BOXES ? 56 : CONSUMERS == 12 ? 32 : 24;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 12 ? (BOXES ? 160 : 152) : BOXES ? 240 : 224;
// With one side, gate and up are the rows g and g + 8 of a fragment, eight of each: two warps share
// their row tiles.
constexpr bool SHARED_TILES = MODE == MODE_GATE_UP && SIDES == 1;
constexpr int MATRICES = MODE == MODE_GATE_UP ? 2 : 1;
constexpr int READ = SHARED_TILES ? 2 : SIDES;  // row tiles of a warp, whole or half
constexpr int ROW_TILES = CONSUMERS * SIDES;
// One row tile of one step.
constexpr int WEIGHT_BYTES = FORMAT == BF16 ? 2048 : FORMAT == FP8 ? 1024 : 512;
constexpr int SCALE_BYTES = FORMAT == NVFP4 ? 64 : FORMAT == MXFP4 ? 32 : 0;
constexpr int X_BYTES = TOKENS * STEP * 2;
constexpr int STAGE_USED = X_BYTES + ROW_TILES * (WEIGHT_BYTES + SCALE_BYTES);
constexpr int STAGE_BYTES = (STAGE_USED + 1023) / 1024 * 1024;  // 128-byte swizzle atoms
constexpr int ROWS_PER_BLOCK = ROW_TILES * 16 / MATRICES;

// Dequantized weights are the stored values times a power of two that keeps every intermediate bf16
// normal.
constexpr float UNIT = FORMAT == NVFP4 ? 128.0f : FORMAT == BF16 ? 1.0f : 4294967296.0f;

struct Matrix {
    const unsigned char* data;
    const unsigned char* scale;
    const float* global_scale;
};

// LIST: every matrix has a multiple of 64 rows, and so has what a warpgroup multiplies of a side.
struct Matrices {
    const int4* table;  // {first tile, rows, bytes of a token before its product, whether float}
    int count, first_tile;
    int capacity;  // tokens that every product has room for
};

struct Gemm {
    const bf16* x = nullptr;
    int64 x_stride = 0, batch_stride = 0;  // elements between tokens and between batches of x
    Matrix side[2] = {};
    // Row tiles of the padded matrix; logical K and N (of one batch).
    int row_tiles, columns, rows;
    int tokens = 0, batches = 1, splits = 1;
    // {expert, first, count, 0} by the sort kernel, or null: tokens in order
    const int4* tiles = nullptr;
    const int* slots = nullptr;  // sorted position -> token * per_token + slot
    int tile_count, per_token = 1;
    Matrices list = {};

    __device__ int steps() const { return (columns + STEP - 1) / STEP; }
    __device__ int row_blocks() const { return (rows + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK; }
    __device__ int total() const { return tile_count * row_blocks() * batches * splits; }
};

__device__ __forceinline__ int token_tiles(int tokens) { return (tokens + TOKENS - 1) / TOKENS; }

struct Tile {
    int expert, first, count, row_block, batch, split, first_step, last_step;
};

// 8 token tiles by all row blocks at a time: the blocks that run together share both operands in
// L2.
__device__ __forceinline__ Tile tile_at(const Gemm& g, int index) {
    Tile t;
    const int row_blocks = g.row_blocks(), steps = g.steps();
    t.split = index % g.splits;
    index /= g.splits;
    int column;
    if (g.tiles) {
        t.batch = 0;
        t.row_block = index % row_blocks;
        const int4 info = g.tiles[index / row_blocks];
        t.expert = info.x, t.first = info.y, t.count = info.z;
    } else {
        const int per_batch = row_blocks * g.tile_count;
        t.batch = index / per_batch;
        index -= t.batch * per_batch;
        const int group = index / (8 * row_blocks);
        const int width = min(8, g.tile_count - 8 * group);
        index -= group * 8 * row_blocks;
        t.row_block = index / width;
        column = 8 * group + index % width;
        t.expert = 0, t.first = column * TOKENS, t.count = min(TOKENS, g.tokens - t.first);
    }
    t.first_step = (int)((int64)steps * t.split / g.splits);
    t.last_step = (int)((int64)steps * (t.split + 1) / g.splits);
    return t;
}

// Eights of tokens that are computed for a tile; the rest of its columns costs nothing. Three
// widths: with a fourth the assembler runs out of registers for asynchronous wgmma and serialises
// all of them. WIDE is for tiles that hold about 100 tokens on average.
#if TOKENS == 32
#define WIDTH_0 1
#define WIDTH_1 2
#elif TOKENS == 64
#define WIDTH_0 4
#define WIDTH_1 6
#elif BOXES && MODE == MODE_LINEAR
#define WIDTH_0 (TOKENS / 32)
#define WIDTH_1 (TOKENS / 16)
#elif TOKENS == 256
#define WIDTH_0 18
#define WIDTH_1 26
#elif MODE == MODE_LINEAR
#define WIDTH_0 4
#define WIDTH_1 8
#elif WIDE
#define WIDTH_0 12
#define WIDTH_1 14
#else
#define WIDTH_0 8
#define WIDTH_1 12
#endif
__device__ __forceinline__ int token_blocks(int count) {
    return count <= 8 * WIDTH_0 ? WIDTH_0 : count <= 8 * WIDTH_1 ? WIDTH_1 : TOKENS / 8;
}

__device__ __forceinline__ int first_row_tile(const Gemm& g, const Tile& t, int side) {
    return t.batch * (g.rows / 16) + t.row_block * (ROWS_PER_BLOCK / 16) +
           (MODE == MODE_GATE_UP ? 0 : side * CONSUMERS);
}

// Row tile of (side, warp), clamped so that warps beyond the matrix read something harmless.
__device__ __forceinline__ int row_tile(const Gemm& g, const Tile& t, int side, int warp) {
    return min(first_row_tile(g, t, side) + (SHARED_TILES ? warp / 2 : warp), g.row_tiles - 1);
}

// Which matrix of a list a row tile is of.
__device__ __forceinline__ int matrix_of(const Matrices& list, int tile) {
    int matrix = 0;
#pragma unroll
    for (int i = 1; i < MOST_MATRICES; i++)
        if (i < list.count && tile >= list.table[i].x - list.first_tile) matrix = i;
    return matrix;
}

__device__ __forceinline__ float global_scale(const Gemm& g, const Tile& t, int side) {
    if (FORMAT != NVFP4) return 1.0f;
    const int matrix = LIST ? matrix_of(g.list, row_tile(g, t, side, warp_index())) : t.expert;
    return g.side[side].global_scale[matrix];
}

// ---------------------------------------------------------------- barriers and copies

// The copies were made by the generic proxy; wgmma reads them through the async proxy.
__device__ __forceinline__ void announce(u32 full_barrier) {
    proxy_fence();
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(full_barrier);
}

__device__ __forceinline__ void consumers_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * WARP) : "memory");
}

struct Pipe {
    u32 stages, full, empty;  // shared addresses
    int stage;
    u32 phase;

    __device__ u32 buffer() const { return stages + stage * STAGE_BYTES; }
    __device__ u32 full_barrier() const { return full + 8 * stage; }
    __device__ u32 empty_barrier() const { return empty + 8 * stage; }
    __device__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    __device__ void wait_full() const { barrier_wait_unlimited(full_barrier(), phase); }
    // Of the threads that copy: until the consumers are done with what this stage holds.
    __device__ void wait_empty() const { barrier_wait(empty_barrier(), phase ^ 1); }
    // ... with every stage, so that a consumer that waits in vain ends by this thread's deadline.
    __device__ void drain() {
        for (int i = 0; i < STAGES; i++, advance()) wait_empty();
    }
};

// ---------------------------------------------------------------- weights to bf16 A fragments

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// One row tile of one stage, as this lane holds it.
struct Weights {
    u32 place, scale_place;  // of what this lane reads in a stage
    uint4 words[FORMAT == FP8 ? 2 : 1];
    u32 data;  // shared address
    // Of rows g and g + 8. MXFP4: codes; NVFP4: factors of the k16 step that has the lane's number
    // among the four lanes that hold these rows.
    u32 scales;
    u32 low, high;  // current factors of rows g and g + 8, twice each

    __device__ void start(int tile, int lane) {
        place = X_BYTES + tile * WEIGHT_BYTES + lane * 16;
        scale_place = X_BYTES + ROW_TILES * WEIGHT_BYTES + tile * SCALE_BYTES +
                      (FORMAT == NVFP4 ? lane * 2 : lane / 4 * 4);
        // Unless it must not know them, ptxas computes both anew in every stage.
        asm("" : "+r"(place), "+r"(scale_place));
    }

    __device__ void load(u32 buffer) {
        data = buffer + place;
        if (FORMAT != BF16) words[0] = load_shared16(data);
        if (FORMAT == FP8) words[sizeof(words) / 16 - 1] = load_shared16(data + 512);
        if (FORMAT == NVFP4) scales = nvfp4_factors(load_shared2(buffer + scale_place));
        if (FORMAT == MXFP4) scales = load_shared4(buffer + scale_place);
    }

    // e4m3 bits at bf16 exponent and mantissa are s * 2^-120; twice multiplied: s * 2^119.
    __device__ static u32 nvfp4_factors(u32 codes) {
        const u32 pair = __byte_perm(codes, 0, 0x4140) << 4;
        return multiply(multiply(pair, 0x7F007F00), 0x77807780);
    }

    // In this form the products read a half of `pair` twice, without an instruction for it.
    __device__ void spread(u32 pair) {
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\nmov.b32 %0, {l, l};\nmov.b32 %1, {h, h};\n}"
            : "=r"(low), "=r"(high)
            : "r"(pair));
    }

    // MXFP4: e8m0 code b to the bf16 2^(b - 127 + 94), infinity where that has no code.
    __device__ void expand_scales(int s) {
        if (FORMAT == NVFP4) {
            spread(__shfl_sync(~0u, scales, s, 4));
        } else if (FORMAT == MXFP4 && s % 2 == 0) {
            const u32 pair =
                __vminu2(__byte_perm(scales, 0, s ? 0x4342 : 0x4140) + 0x005E005E, 0x00FF00FF)
                << 7;
            spread(pair);
        }
    }

    // Of row g, or of row g + 8 where `half` is 1.
    __device__ void dequantize_half(u32& first, u32& second, int s, int half) {
        if (FORMAT == BF16) {
            first = load_shared4(data + s * 512 + 4 * half);
            second = load_shared4(data + s * 512 + 8 + 4 * half);
            return;
        }
        constexpr u32 SIGN = 0x80008000;
        if (FORMAT == FP8) {
            const uint4 w = words[s / 2 % (sizeof(words) / 16)];
            const u32 pairs[2] = {s % 2 ? w.z : w.x, s % 2 ? w.w : w.y};
            u32* const to[2] = {&first, &second};
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u32 code = __byte_perm(pairs[r], 0, half ? 0x3424 : 0x1404);
                *to[r] = multiply((code & SIGN) | ((code >> 4) & 0x07F007F0), low);
            }
            return;
        }
        constexpr u32 MAGNITUDE = 0x01C001C0;
        const u32 w = s == 0 ? words[0].x : s == 1 ? words[0].y : s == 2 ? words[0].z : words[0].w;
        expand_scales(s);
        const u32 factor = half ? high : low, moved = w << (3 * half), signs = w << (1 + half);
        first = multiply((moved & SIGN) | ((moved >> 3) & MAGNITUDE), factor);
        second = multiply((signs & SIGN) | ((moved << 3) & MAGNITUDE), factor);
    }

    __device__ void dequantize(u32 (&a)[4], int s) {
        if (FORMAT == BF16) {
            const uint4 w = load_shared16(data + s * 512);
            a[0] = w.x, a[1] = w.y, a[2] = w.z, a[3] = w.w;
            return;
        }
        constexpr u32 SIGN = 0x80008000;
        if (FORMAT == FP8) {
            // e4m3 code as bf16 is its value * 2^-120.
            const uint4 w = words[s / 2 % (sizeof(words) / 16)];
            const u32 pairs[2] = {s % 2 ? w.z : w.x, s % 2 ? w.w : w.y};
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const u32 code = __byte_perm(pairs[r / 2], 0, r % 2 ? 0x3424 : 0x1404);
                a[r] = multiply((code & SIGN) | ((code >> 4) & 0x07F007F0), low);
            }
            return;
        }
        // e2m1 code as bf16 is its value * 2^-126.
        constexpr u32 MAGNITUDE = 0x01C001C0;
        const u32 w = s == 0 ? words[0].x : s == 1 ? words[0].y : s == 2 ? words[0].z : words[0].w;
        expand_scales(s);
        const u32 by3 = w << 3;
        a[0] = multiply((w & SIGN) | ((w >> 3) & MAGNITUDE), low);
        a[1] = multiply((by3 & SIGN) | (w & MAGNITUDE), high);
        a[2] = multiply(((w << 1) & SIGN) | (by3 & MAGNITUDE), low);
        // w << 2 and w << 6 at once: no bit of one is where the other has one that is kept.
        a[3] = multiply(((w & 0x20072007) * 68) & (SIGN | MAGNITUDE), high);
    }
};

// FP8 block scale s = m * 2^e, 1 <= m < 2: 2^e goes on the weights (exactly), m on the accumulators
// when it changes, which it never does for the power-of-two scales of the real checkpoints.
struct BlockScale {
    const float* row;
    int last;
    float upcoming, mantissa;

    __device__ void start(const Gemm& g, const Tile& t, int side, int tile) {
        const int columns = (g.columns + 127) / 128;
        const int rows = (g.row_tiles * 16 + 127) / 128;
        // The scale has ceil(N / 128) rows; padding N to 64 never adds one. A list's has one for
        // every 64.
        row = reinterpret_cast<const float*>(g.side[side].scale) +
              ((int64)t.expert * rows + tile / (LIST ? 4 : 8)) * columns;
        last = columns - 1;
        upcoming = __ldg(row + min(t.first_step / 2, last));
        mantissa = 1.0f;
    }

    // Returns the bf16 pair 2^(e + 88) for `step`; `change` is what accumulators must be multiplied
    // by first.
    __device__ u32 next(int step, float& change) {
        const u32 bits = __float_as_uint(upcoming);
        upcoming = __ldg(row + min((step + 1) / 2, last));
        const u32 exponent = (bits >> 23) & 0xFF;
        const float m = exponent ? __uint_as_float((bits & 0x7FFFFF) | 0x3F800000) : mantissa;
        change = mantissa / m;
        mantissa = m;
        return exponent ? min(exponent + 88, 255u) * 0x00800080u : 0u;
    }
};

// ---------------------------------------------------------------- products

template <int BLOCKS>
using Accumulators = float[SIDES][BLOCKS][4];

__device__ __forceinline__ void load_matrices(u32 (&b)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address));
}

template <int BLOCKS>
__device__ __forceinline__ void rescale(float (&acc)[BLOCKS][4], float factor, float below) {
#pragma unroll
    for (int j = 0; j < BLOCKS; j++)
#pragma unroll
        for (int r = 0; r < 4; r++) acc[j][r] *= r < 2 ? factor : below;
}

template <int BLOCKS>
__device__ __forceinline__ void rescale(float (&acc)[BLOCKS][4], float factor) {
    rescale(acc, factor, factor);
}

// Every sum by the change of its matrix's scale.
template <int BLOCKS>
__device__ __forceinline__ void rescale_all(Accumulators<BLOCKS>& acc,
                                            const float (&change)[READ]) {
    if (SHARED_TILES) rescale(acc[0], change[0], change[READ - 1]);
    else
#pragma unroll
        for (int side = 0; side < SIDES; side++) rescale(acc[side], change[side]);
}

#if WGMMA
#include "prefill_wgmma.cuh"
#else

template <int BLOCKS>
__device__ __forceinline__ void accumulate(Accumulators<BLOCKS>& acc, float (&unit)[SIDES],
                                           const Gemm& g, const Tile& t, Pipe& pipe, int warp,
                                           int lane) {
    BlockScale block_scale[SIDES];
    if (FORMAT == FP8)
        for (int side = 0; side < SIDES; side++)
            block_scale[side].start(g, t, side, row_tile(g, t, side, warp));
    // Lane l gives the address of row l % 8 of matrix l / 8: (tokens 0-7, k 0-7), (0-7, 8-15),
    // (8-15, 0-7), (8-15, 8-15).
    const int row = lane % 8 + (lane / 16) * 8, half = lane / 8 % 2;
    Weights weights[SIDES];
#pragma unroll
    for (int side = 0; side < SIDES; side++) weights[side].start(side * CONSUMERS + warp, lane);
    for (int step = t.first_step; step < t.last_step; step++) {
        pipe.wait_full();
        const u32 buffer = pipe.buffer();
#pragma unroll
        for (int side = 0; side < SIDES; side++) {
            // weight_NK = dequantize(data, block_scale)
            weights[side].load(buffer);
            if (FORMAT == FP8) {
                float change;
                weights[side].low = block_scale[side].next(step, change);
                if (change != 1.0f) rescale(acc[side], change);
            }
        }
#pragma unroll
        for (int s = 0; s < STEP / 16; s++) {
            u32 a[SIDES][4];
#pragma unroll
            for (int side = 0; side < SIDES; side++) weights[side].dequantize(a[side], s);
            const u32 address = buffer + row * 128 + (((2 * s + half) ^ (lane % 8)) << 4);
#pragma unroll
            for (int j = 0; j < BLOCKS; j += 2) {
                u32 b[4];
                // y_NT += weight_NK @ x_TK.T
                load_matrices(b, address + j * 1024);
#pragma unroll
                for (int side = 0; side < SIDES; side++) {
                    mma_bf16(acc[side][j], a[side], b[0], b[1]);
                    if (j + 1 < BLOCKS) mma_bf16(acc[side][j + 1], a[side], b[2], b[3]);
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(pipe.empty_barrier());
        pipe.advance();
    }
    for (int side = 0; side < SIDES; side++)
        unit[side] = FORMAT == FP8 ? UNIT * block_scale[side].mantissa : UNIT;
}
#endif
