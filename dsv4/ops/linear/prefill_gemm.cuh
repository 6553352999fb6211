// Weight-only matrix products of many tokens: y[t, n] = sum_k x[t, k] * W[n, k], W dequantized to
// bf16 in registers.
//
// The weights are the A operand (rows of W along M, in the packed fragment order), tokens are N. A
// block of 8 consumer warps and 4 producer warps computes 16 row tiles of 16 rows times up to 128
// tokens; warp w owns row tiles w and 8 + w. Of experts that have few tokens 12 consumer warps
// compute 24 row tiles times up to 32 or 64 tokens: what such tiles wait for are the instructions
// that copy and decode weights. Blocks are persistent: the producer runs ahead of the consumers
// across tile borders, so that the next tile's operands arrive during this tile's epilogue.
//
// MODE_LINEAR   y = x * W^T, with batches (grouped linear) and split K (fixed order of summation)
// MODE_GATE_UP  h = bf16(routing weight * silu(min(gate, limit)) * clamp(up)), gathered tokens
// MODE_DOWN     float rows of W2 * h, scattered to (token, slot)
//
// -DWGMMA=1 multiplies by wgmma (sm_90a only); else by mma.sync. Operand layouts in registers and
// shared memory agree.
#pragma once
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
// Stages whose copies the producers have issued but not yet announced.
#ifndef LAG
#define LAG (STAGES >= 6 ? 2 : 1)
#endif

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int STEP = 64;  // columns of one pipeline stage: 128-byte rows of x
// Warps: one warpgroup, which gives most of its registers to the consumers
constexpr int PRODUCERS = 4;
constexpr int THREADS = (CONSUMERS + PRODUCERS) * WARP;
// 384 threads start with 168 registers each, 512 with 128: the sums are the same.
constexpr int PRODUCER_REGISTERS = 56;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 12 ? 152 : 224;
constexpr int SIDES = 2;  // row tiles per warp: gate and up, or 128 rows apart
constexpr int ROW_TILES = CONSUMERS * SIDES;
// One row tile of one step.
constexpr int WEIGHT_BYTES = FORMAT == BF16 ? 2048 : FORMAT == FP8 ? 1024 : 512;
constexpr int SCALE_BYTES = FORMAT == NVFP4 ? 64 : FORMAT == MXFP4 ? 32 : 0;
constexpr int X_BYTES = TOKENS * STEP * 2;
constexpr int STAGE_USED = X_BYTES + ROW_TILES * (WEIGHT_BYTES + SCALE_BYTES);
constexpr int STAGE_BYTES = (STAGE_USED + 1023) / 1024 * 1024;  // 128-byte swizzle atoms
constexpr int ROWS_PER_BLOCK = CONSUMERS * 16 * (MODE == MODE_GATE_UP ? 1 : SIDES);

// Dequantized weights are the stored values times a power of two that keeps every intermediate bf16
// normal.
constexpr float UNIT = FORMAT == NVFP4 ? 128.0f : FORMAT == BF16 ? 1.0f : 4294967296.0f;

struct Matrix {
    const unsigned char* data;
    const unsigned char* scale;
    const float* global_scale;
};

struct Gemm {
    const bf16* x;
    int64 x_stride, batch_stride;  // elements between tokens and between batches of x
    Matrix side[SIDES];
    int row_tiles, columns, rows;  // row tiles of the padded matrix; logical K and N (of one batch)
    int tokens, batches, splits;
    const int4* tiles;  // {expert, first, count, 0} by the sort kernel, or null: tokens in order
    const int* slots;   // sorted position -> token * per_token + slot
    int tile_count, per_token;

    __device__ int steps() const { return (columns + STEP - 1) / STEP; }
    __device__ int row_blocks() const { return (rows + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK; }
    __device__ int total() const { return tile_count * row_blocks() * batches * splits; }
};

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
    return t.batch * (g.rows / 16) +
           (MODE == MODE_GATE_UP ? t.row_block : t.row_block * SIDES + side) * CONSUMERS;
}

// Row tile of (side, warp), clamped so that warps beyond the matrix read something harmless.
__device__ __forceinline__ int row_tile(const Gemm& g, const Tile& t, int side, int warp) {
    return min(first_row_tile(g, t, side) + warp, g.row_tiles - 1);
}

// ---------------------------------------------------------------- barriers and copies

// Without the deadline of barrier_wait: its clock costs registers that the consumers do not have.
__device__ __forceinline__ void stage_wait(u32 barrier, u32 parity) {
    while (!barrier_try(barrier, parity)) {
    }
}

// The copies were made by the generic proxy; wgmma reads them through the async proxy.
__device__ __forceinline__ void announce(u32 full_barrier) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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
};

// ---------------------------------------------------------------- producer

// One stage's data or scales of all row tiles, BYTES each, in 16-byte parts. Bulk copies would be
// 16 or 32 a stage, and one warp issues about one in 75 clocks.
template <int BYTES>
__device__ __forceinline__ void copy_weights(u32 to, const unsigned char* const (&from)[SIDES],
                                             const int (&first)[SIDES], int last, int stride,
                                             int thread) {
    constexpr int COPIERS = PRODUCERS * WARP;
    constexpr int PER_TILE = BYTES / 16;
    constexpr int PARTS = ROW_TILES * PER_TILE;
    constexpr int APART = COPIERS / PER_TILE;  // row tiles between the parts of one thread
#pragma unroll
    for (int i = 0; i * COPIERS < PARTS; i++) {
        const int place = thread / PER_TILE + i * APART;
        const int side = APART <= CONSUMERS ? i * APART / CONSUMERS : place / CONSUMERS;
        const int tile = min((side ? first[1] : first[0]) + place % CONSUMERS, last);
        if (PARTS % COPIERS == 0 || place < ROW_TILES)
            cp_async16(to + (thread + i * COPIERS) * 16,
                       (side ? from[1] : from[0]) +
                           (u64)((u32)tile * (u32)(stride / 16) + thread % PER_TILE) * 16,
                       16);
    }
}

// Eight threads copy one row's 128 bytes of x; 16-byte chunk c of row r goes to place c ^ (r % 8).
__device__ __forceinline__ void produce(const Gemm& g, Pipe pipe) {
    constexpr int ROWS = TOKENS / (PRODUCERS * WARP / 8);  // of one thread
    constexpr int APART = TOKENS / ROWS;                   // between them
    const int thread = threadIdx.x - CONSUMERS * WARP;
    const int chunk = thread % 8;
    const int row = thread / 8;
    const u32 place = row * 128 + ((chunk ^ (row % 8)) << 4);
    const int steps = g.steps(), last = g.row_tiles - 1;
    Pipe landed = pipe;
    int waiting = 0;  // stages issued and not announced
    for (int index = blockIdx.x; index < g.total(); index += gridDim.x) {
        const Tile t = tile_at(g, index);
        const int rows = 8 * token_blocks(t.count);
        u32 offset[ROWS];  // in 16-byte units: a register less than a pointer
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            // x_TK = x[slots // per_token]
            int source = t.first + min(row + i * APART, t.count - 1);
            if (MODE == MODE_GATE_UP && g.slots) source = g.slots[source] / g.per_token;
            offset[i] = source * (g.x_stride / 8);
        }
        const int first[SIDES] = {first_row_tile(g, t, 0), first_row_tile(g, t, 1)};
        const int64 skipped = (int64)t.expert * g.row_tiles * steps + t.first_step;
        const unsigned char* data[SIDES] = {g.side[0].data + skipped * WEIGHT_BYTES,
                                            g.side[1].data + skipped * WEIGHT_BYTES};
        const unsigned char* scale[SIDES] = {g.side[0].scale + skipped * SCALE_BYTES,
                                             g.side[1].scale + skipped * SCALE_BYTES};
        const bf16* x = g.x + t.batch * g.batch_stride;
        for (int step = t.first_step; step < t.last_step; step++) {
            stage_wait(pipe.empty_barrier(), pipe.phase ^ 1);
            const u32 buffer = pipe.buffer();
            copy_weights<WEIGHT_BYTES>(buffer + X_BYTES, data, first, last, steps * WEIGHT_BYTES,
                                       thread);
            if constexpr (SCALE_BYTES > 0)
                copy_weights<SCALE_BYTES>(buffer + X_BYTES + ROW_TILES * WEIGHT_BYTES, scale, first,
                                          last, steps * SCALE_BYTES, thread);
            for (int side = 0; side < SIDES; side++)
                data[side] += WEIGHT_BYTES, scale[side] += SCALE_BYTES;
            const int column = step * STEP + chunk * 8;
            const int valid = max(0, min(16, 2 * (g.columns - column)));
            const bf16* from = x + (valid ? column : 0);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (i * APART < rows)
                    cp_async16(buffer + place + i * APART * 128, from + (u64)offset[i] * 8,
                               row + i * APART < t.count ? valid : 0);
            cp_async_commit();
            pipe.advance();
            if (waiting == LAG) {
                cp_async_wait<LAG>();
                announce(landed.full_barrier());
                landed.advance();
            } else {
                waiting++;
            }
        }
    }
    cp_async_wait<0>();
    for (; waiting > 0; waiting--) {
        announce(landed.full_barrier());
        landed.advance();
    }
}

// ---------------------------------------------------------------- weights to bf16 A fragments

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// One row tile of one stage, as this lane holds it.
struct Weights {
    uint4 words[FORMAT == FP8 ? 2 : 1];
    u32 data;  // shared address
    uint2 scales;
    u32 low, high;  // current factors of rows g and g + 8, twice each

    __device__ void load(u32 buffer, int tile, int lane) {
        data = buffer + X_BYTES + tile * WEIGHT_BYTES + lane * 16;
        if (FORMAT != BF16) words[0] = load_shared16(data);
        if (FORMAT == FP8) words[sizeof(words) / 16 - 1] = load_shared16(data + 512);
        const u32 scale = buffer + X_BYTES + ROW_TILES * WEIGHT_BYTES + tile * SCALE_BYTES;
        if (FORMAT == NVFP4) scales = load_shared8(scale + (lane / 4) * 8);
        if (FORMAT == MXFP4) scales.x = load_shared4(scale + (lane / 4) * 4);
    }

    // In this form the products read a half of `pair` twice, without an instruction for it.
    __device__ void spread(u32 pair) {
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\nmov.b32 %0, {l, l};\nmov.b32 %1, {h, h};\n}"
            : "=r"(low), "=r"(high)
            : "r"(pair));
    }

    // NVFP4: e4m3 bits at bf16 exponent and mantissa are s * 2^-120; twice multiplied: s * 2^119.
    // MXFP4: e8m0 code b to the bf16 2^(b - 127 + 94), infinity where that has no code.
    __device__ void expand_scales(int s) {
        if (FORMAT == NVFP4) {
            u32 pair = __byte_perm(s < 2 ? scales.x : scales.y, 0, s % 2 ? 0x4342 : 0x4140) << 4;
            pair = multiply(multiply(pair, 0x7F007F00), 0x77807780);
            spread(pair);
        } else if (FORMAT == MXFP4 && s % 2 == 0) {
            const u32 pair =
                __vminu2(__byte_perm(scales.x, 0, s ? 0x4342 : 0x4140) + 0x005E005E, 0x00FF00FF)
                << 7;
            spread(pair);
        }
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
        a[3] = multiply(((w << 2) & SIGN) | ((w << 6) & MAGNITUDE), high);
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
        // The scale has ceil(N / 128) rows; padding N to 64 never adds one.
        row = reinterpret_cast<const float*>(g.side[side].scale) +
              ((int64)t.expert * rows + tile / 8) * columns;
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

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(u32 (&b)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address));
}

template <int BLOCKS>
__device__ __forceinline__ void rescale(float (&acc)[BLOCKS][4], float factor) {
#pragma unroll
    for (int j = 0; j < BLOCKS; j++)
#pragma unroll
        for (int r = 0; r < 4; r++) acc[j][r] *= factor;
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
    for (int step = t.first_step; step < t.last_step; step++) {
        stage_wait(pipe.full_barrier(), pipe.phase);
        const u32 buffer = pipe.buffer();
        Weights weights[SIDES];
#pragma unroll
        for (int side = 0; side < SIDES; side++) {
            // weight_NK = dequantize(data, block_scale)
            weights[side].load(buffer, side * CONSUMERS + warp, lane);
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
                    mma(acc[side][j], a[side], b[0], b[1]);
                    if (j + 1 < BLOCKS) mma(acc[side][j + 1], a[side], b[2], b[3]);
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

// ---------------------------------------------------------------- results

// {row g; tokens 2t, 2t + 1} to {token g; rows 2t, 2t + 1}.
__device__ __forceinline__ u32 transpose(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    u32 moved;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                 : "=r"(moved)
                 : "r"(*reinterpret_cast<const u32*>(&pair)));
    return moved;
}

struct Output {
    void* y;
    int64 y_stride;        // elements between tokens
    const float* routing;  // MODE_GATE_UP: weight by (token, slot), or null: 1
    float limit;
    float* partial;  // MODE_LINEAR with splits: [tile][split][value][consumer thread]
    int* counters;
    int* flag;
};

// Sums the splits in order in the block that arrives last; false in the others.
template <int BLOCKS>
__device__ __forceinline__ bool join_splits(Accumulators<BLOCKS>& acc, const Gemm& g, const Tile& t,
                                            const Output& out, int index) {
    constexpr int COUNT = CONSUMERS * WARP;
    constexpr int SIZE = SIDES * TOKENS / 8 * 4 * COUNT;
    float* mine = out.partial + (int64)index * SIZE + threadIdx.x;
#pragma unroll
    for (int i = 0; i < SIDES * BLOCKS * 4; i++) mine[i * COUNT] = (&acc[0][0][0])[i];
    __threadfence();
    consumers_sync();
    if (threadIdx.x == 0) {
        int* counter = out.counters + index / g.splits;
        const bool last = atomicAdd(counter, 1) == g.splits - 1;
        if (last) *counter = 0;
        *out.flag = last;
    }
    consumers_sync();
    // y_NT = partial_NT.sum(splits)
    const bool last = *out.flag;
    consumers_sync();
    if (!last) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < SIDES * BLOCKS * 4; i++) (&acc[0][0][0])[i] = 0.0f;
#pragma unroll 1
    for (int split = 0; split < g.splits; split++) {
        const float* other = out.partial + (int64)(index - t.split + split) * SIZE + threadIdx.x;
#pragma unroll
        for (int i = 0; i < SIDES * BLOCKS * 4; i++)
            (&acc[0][0][0])[i] += __ldcg(other + i * COUNT);
    }
    return true;
}

// Float rows: eight lanes write one token's 32 bytes.
template <int BLOCKS>
__device__ __forceinline__ void store_float(const Accumulators<BLOCKS>& acc,
                                            const float (&alpha)[SIDES], const Gemm& g,
                                            const Tile& t, const Output& out,
                                            const int (&slot)[TOKENS / WARP], int warp, int lane) {
    const int row = t.row_block * ROWS_PER_BLOCK + warp * 16 + lane / 4;
    float* y = static_cast<float*>(out.y) + (int64)t.batch * g.rows + row;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int column = 8 * j + 2 * (lane % 4) + half;
            const int found = __shfl_sync(~0u, slot[j / 4], column % WARP);
            float* to = y + (MODE == MODE_DOWN ? found : t.first + column) * out.y_stride;
            if (column < t.count)
#pragma unroll
                for (int side = 0; side < SIDES; side++)
#pragma unroll
                    for (int below = 0; below < 16; below += 8)
                        if (row + side * CONSUMERS * 16 + below < g.rows)
                            to[side * CONSUMERS * 16 + below] =
                                acc[side][j][below / 4 + half] * alpha[side];
        }
}

// bf16 rows of stride y_stride (even): four lanes write one token's 16 bytes. Writes an even number
// of rows.
template <int BLOCKS>
__device__ __forceinline__ void store_rounded(const Accumulators<BLOCKS>& acc,
                                              const float (&alpha)[SIDES], const Gemm& g,
                                              const Tile& t, const Output& out, int warp,
                                              int lane) {
    const int row = t.row_block * ROWS_PER_BLOCK + warp * 16 + 2 * (lane % 4);
    bf16* y = static_cast<bf16*>(out.y) + (int64)t.batch * g.rows + row +
              (t.first + lane / 4) * out.y_stride;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++)
#pragma unroll
        for (int side = 0; side < SIDES; side++)
#pragma unroll
            for (int below = 0; below < 16; below += 8) {
                const float (&c)[4] = acc[side][j];
                const u32 pair =
                    transpose(c[below / 4] * alpha[side], c[below / 4 + 1] * alpha[side]);
                const int offset = side * CONSUMERS * 16 + below;
                if (8 * j + lane / 4 < t.count && row + offset < g.rows)
                    *reinterpret_cast<u32*>(y + 8 * j * out.y_stride + offset) = pair;
            }
}

__device__ __forceinline__ float gated(float gate, float up, float weight, float limit) {
    // Comparisons, not fminf: a NaN must stay one.
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return __fdividef(gate, 1.0f + __expf(-gate)) * up * weight;
}

template <int BLOCKS>
__device__ __forceinline__ void store_gated(const Accumulators<BLOCKS>& acc,
                                            const float (&alpha)[SIDES], const Gemm& g,
                                            const Tile& t, const Output& out,
                                            const float (&routing)[TOKENS / WARP], int warp,
                                            int lane) {
    const int row = t.row_block * ROWS_PER_BLOCK + warp * 16 + 2 * (lane % 4);
    bf16* y = static_cast<bf16*>(out.y) + row + (t.first + lane / 4) * out.y_stride;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        float h[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float weight =
                __shfl_sync(~0u, routing[j / 4], (8 * j + 2 * (lane % 4) + r % 2) % WARP);
            // h = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * routing
            h[r] = gated(acc[0][j][r] * alpha[0], acc[SIDES - 1][j][r] * alpha[SIDES - 1], weight,
                         out.limit);
        }
        const u32 top = transpose(h[0], h[1]), bottom = transpose(h[2], h[3]);
        bf16* to = y + 8 * j * out.y_stride;
        if (8 * j + lane / 4 < t.count) {
            if (row < g.rows) *reinterpret_cast<u32*>(to) = top;
            if (row + 8 < g.rows) *reinterpret_cast<u32*>(to + 8) = bottom;
        }
    }
}

template <int BLOCKS>
__device__ __forceinline__ void consume_tile(const Gemm& g, Tile& t, const Output& out, Pipe& pipe,
                                             int index) {
    const int warp = warp_index();
    const int lane = threadIdx.x % WARP;
    int slot[TOKENS / WARP] = {};
    float routing[TOKENS / WARP];
    float alpha[SIDES];
#pragma unroll
    for (int i = 0; i < TOKENS / WARP; i++) {
        const bool valid = i * WARP + lane < t.count;
        if (MODE == MODE_DOWN || (MODE == MODE_GATE_UP && g.slots))
            slot[i] = valid ? g.slots[t.first + i * WARP + lane] : 0;
        routing[i] = MODE == MODE_GATE_UP && out.routing && valid ? out.routing[slot[i]] : 1.0f;
    }
#pragma unroll
    for (int side = 0; side < SIDES; side++)
        alpha[side] = FORMAT == NVFP4 ? g.side[side].global_scale[t.expert] : 1.0f;
    Accumulators<BLOCKS> acc = {};
    float unit[SIDES];
    // y_NT = weight_NK @ x_TK.T
    accumulate<BLOCKS>(acc, unit, g, t, pipe, warp, lane);
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
        if (MODE == MODE_LINEAR && FORMAT == FP8 && g.splits > 1) {
            // Splits may end at different mantissas.
            rescale(acc[side], unit[side] / UNIT);
            unit[side] = UNIT;
        }
        // y_NT *= global_scale, and the power of two of the dequantized weights
        alpha[side] *= unit[side];
    }
    const Tile done = t;
    // Read here, the next tile's entry arrives while this one's results are written.
    if (index + (int)gridDim.x < g.total()) t = tile_at(g, index + gridDim.x);
    if (MODE == MODE_LINEAR && g.splits > 1 && !join_splits<BLOCKS>(acc, g, done, out, index))
        return;
    if (MODE == MODE_GATE_UP) store_gated<BLOCKS>(acc, alpha, g, done, out, routing, warp, lane);
    else if (MODE == MODE_DOWN || OUT_FLOAT)
        store_float<BLOCKS>(acc, alpha, g, done, out, slot, warp, lane);
    else store_rounded<BLOCKS>(acc, alpha, g, done, out, warp, lane);
}

__device__ __forceinline__ void consume(const Gemm& g, const Output& out, Pipe pipe) {
    if (blockIdx.x >= g.total()) return;
    Tile t = tile_at(g, blockIdx.x);
    for (int index = blockIdx.x; index < g.total(); index += gridDim.x) {
        switch (token_blocks(t.count)) {
            case WIDTH_0:
                consume_tile<WIDTH_0>(g, t, out, pipe, index);
                break;
            case WIDTH_1:
                consume_tile<WIDTH_1>(g, t, out, pipe, index);
                break;
            default:
                consume_tile<TOKENS / 8>(g, t, out, pipe, index);
                break;
        }
    }
}

// Shared memory: STAGES stages from a 1024-byte border, then barriers and a flag. 2048 bytes
// besides the stages.
__device__ __forceinline__ void run(const Gemm& g, Output out) {
    extern __shared__ unsigned char shared[];
    const u32 base = shared_address(shared), stages = (base + 1023) / 1024 * 1024;
    unsigned char* rest = shared + (stages - base) + STAGES * STAGE_BYTES;
    const u32 full = shared_address(rest);
    const Pipe pipe = {stages, full, full + 8 * STAGES, 0, 0};
    out.flag = reinterpret_cast<int*>(rest + 16 * STAGES);
    static_assert(16 * STAGES + 4 <= 1024, "barriers and flag");
    static_assert(STAGES * STAGE_BYTES + 2048 <= SHARED_BYTES, "as the launchers count it");
    static_assert(STAGES > LAG + 1, "the consumers hold one stage while the next is announced");
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(pipe.full + 8 * i, PRODUCERS);
            barrier_init(pipe.empty + 8 * i, CONSUMERS);
        }
        barrier_fence();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS * WARP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        produce(g, pipe);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(g, out, pipe);
    }
}

#if MODE == MODE_LINEAR
// x [tokens, batches, columns] (strides in elements), weight [batches * rows, columns], y [tokens,
// batches, rows] with an even y_stride for bf16.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_linear(const bf16* x, const unsigned char* weight_data,
                   const unsigned char* weight_block_scale, const float* weight_global_scale,
                   void* y, float* partial, int* counters, int tokens, int rows, int columns,
                   int row_tiles, int x_stride, int batch_stride, int y_stride, int batches,
                   int splits) {
    pdl_wait();
    pdl_launch();
    const Matrix matrix = {weight_data, weight_block_scale, weight_global_scale};
    const Gemm g = {x,
                    x_stride,
                    batch_stride,
                    {matrix, matrix},
                    row_tiles,
                    columns,
                    rows,
                    tokens,
                    batches,
                    splits,
                    nullptr,
                    nullptr,
                    (tokens + TOKENS - 1) / TOKENS,
                    1};
    run(g, {y, y_stride, nullptr, 0.0f, partial, counters, nullptr});
}
#elif MODE == MODE_GATE_UP
// h[i] = gated products of x[slots[i] / per_token]; without tiles: of x[i] for every token, with
// weight 1.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_gate_up(const bf16* x, const unsigned char* w1_data,
                    const unsigned char* w1_block_scale, const float* w1_global_scale,
                    const unsigned char* w3_data, const unsigned char* w3_block_scale,
                    const float* w3_global_scale, const int4* tiles, const int* tile_count,
                    const int* slots, const float* routing, bf16* h, int tokens, int rows,
                    int columns, int row_tiles, int x_stride, int h_stride, int per_token,
                    float limit) {
    pdl_wait();
    pdl_launch();
    const Matrix first = {w1_data, w1_block_scale, w1_global_scale};
    const Matrix second = {w3_data, w3_block_scale, w3_global_scale};
    const int count = tiles ? *tile_count : (tokens + TOKENS - 1) / TOKENS;
    const Gemm g = {
        x,      x_stride, 0, {first, second}, row_tiles, columns, rows,
        tokens, 1,        1, tiles,           slots,     count,   per_token,
    };
    run(g, {h, h_stride, routing, limit, nullptr, nullptr, nullptr});
}
#else
// y[slots[i]] = W2[expert of i] * h[i], float rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_down(const bf16* h, const unsigned char* w2_data, const unsigned char* w2_block_scale,
                 const float* w2_global_scale, const int4* tiles, const int* tile_count,
                 const int* slots, float* y, int rows, int columns, int row_tiles, int h_stride) {
    pdl_wait();
    pdl_launch();
    const Matrix matrix = {w2_data, w2_block_scale, w2_global_scale};
    const Gemm g = {
        h, h_stride, 0,     {matrix, matrix}, row_tiles, columns, rows, 0, 1,
        1, tiles,    slots, *tile_count,      1,
    };
    run(g, {y, rows, nullptr, 0.0f, nullptr, nullptr, nullptr});
}
#endif
