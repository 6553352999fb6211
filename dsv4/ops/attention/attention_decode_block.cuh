// What a block of attention_decode is: its shape, what it has in shared memory, and which row of a
// tile each of its columns is.
#pragma once
#include "cluster.cuh"
#include "kv_rows.cuh"
#include "rope.cuh"
#include <math_constants.h>

#ifndef FORMAT  // ROW_KV_FP8 or ROW_BF16
#define FORMAT ROW_KV_FP8
#endif
#ifndef LISTED  // 1: compressed entries come from a list, 0: all complete ones
#define LISTED 1
#endif
#ifndef CLUSTER  // blocks that share the keys of 16 heads
#define CLUSTER 8
#endif
#ifndef TILE  // rows in a stage
#define TILE 80
#endif
// 1: a block has at most TILE keys; they are multiplied in chunks, as they arrive. 2: any number
#ifndef STAGES
#define STAGES 2
#endif
#ifndef WARPS  // 8 or 16
#define WARPS 8
#endif
#ifndef SPLITS  // clusters that share the keys of 16 heads when there are more than SPLIT_KEYS
#define SPLITS 1
#endif
#ifndef SPLIT_KEYS
#define SPLIT_KEYS 2048
#endif
// 1: the next kernel may start when the rows are there, not at once; with a list and one stage
#ifndef ROWS_FIRST
#define ROWS_FIRST 0
#endif
// Clusters that run at once. Further ones start when others have ended, and with them what came
// before: they let the next kernel start before they look for their rows
#ifndef WAVE
#define WAVE 14
#endif
// 1: every token sees what the last one sees (dsv4/ops/attention/block.py)
#ifndef AS_LAST
#define AS_LAST 0
#endif

constexpr int DIM = 512;
constexpr int ROTARY = 64;
constexpr int HEADS = 16;
constexpr int THREADS = WARPS * WARP;
// Warps that share a group of 64 values in p·v, or a fourth of q·k and half the keys.
constexpr int SPLIT = WARPS / 8;
constexpr int NTILES = 8 / SPLIT;  // n-tiles of a warp in p·v
constexpr int CHUNKS = STAGES == 1 ? (TILE + 79) / 80 : 1;
constexpr int CHUNK = TILE / CHUNKS;  // rows that are awaited together
constexpr bool FP8 = FORMAT == ROW_KV_FP8;
// Whether rows that earlier steps have written are asked for before the kernel in front has ended:
// what a list says is known behind it alone.
constexpr bool EARLY = !LISTED;
constexpr int ROW_BYTES = FP8 ? 576 : 1024;
constexpr int SCALE_BYTES = 8;
// Rows r and r + 2 lie 64 bytes apart modulo the 128 of a shared memory access, four neighbours 32
// bytes apart.
constexpr int PITCH = ROW_BYTES + 32;
constexpr int LOGIT_PITCH = TILE + 8;                           // floats
constexpr int WEIGHT_PITCH = (2 * TILE + 127) / 128 * 64 + 16;  // halves
constexpr int PIECE = 8;                         // values that are merged together: 16 bytes of f16
constexpr int PIECES = 4 * NTILES / PIECE;       // of a thread
constexpr int SLOTS = WARPS * PIECES / CLUSTER;  // pieces per lane that a block finishes
constexpr int OUT = SLOTS * WARP * PIECE / THREADS;  // values that a thread finishes
constexpr float QUERY_SCALE = 0.0625f;               // room in f16 for queries up to 2^20
constexpr int QUERY_LOG2 = 4;                        // taken back with the block scale
// Softmax weights are kept times 2^10, far from the subnormals of f16
constexpr int WEIGHT_LOG2 = 10;
// Half of the registers where two blocks also have room in shared memory.
constexpr int BLOCKS_PER_SM = STAGES == 1 && WARPS == 8 && TILE <= 80 ? 2 : 1;
static_assert(CHUNK % 16 == 0 && CHUNK * CHUNKS == TILE, "unsupported shape");
static_assert(SLOTS * CLUSTER == WARPS * PIECES && OUT % 2 == 0 && OUT <= PIECE,
              "unsupported shape");
static_assert(!ROWS_FIRST || (LISTED && STAGES == 1), "unsupported shape");
static_assert((SPLIT == 1 || SPLIT == 2) && (STAGES == 1 || STAGES == 2), "unsupported shape");

struct Shared {
    unsigned char rows[STAGES][TILE * PITCH];
    float logits[4][HEADS][LOGIT_PITCH];
    __half weights[FP8 ? HEADS : 1][WEIGHT_PITCH];  // for e4m3 groups
    bf16 weights_bf16[HEADS][WEIGHT_PITCH];         // for bf16 groups
    __half factors[8][TILE];  // block scale of a column relative to the largest, by group
    // What the blocks of the cluster, this one too, have sent to this block: its pieces of their
    // results (f16), the power of two to multiply them with, and the maximum and sum of every head.
    uint4 merge[CLUSTER][SLOTS][WARP];
    float2 peak_sum[CLUSTER][HEADS];
    float merge_scale[CLUSTER][SLOTS];
    float rescale[HEADS];
    float sinks[HEADS];  // times log2 e
    Turn turns[ROTARY / 2];
    int counts[WARPS];
    int last, unused;
    uint64 merged, unused2;  // inbox of what the cluster sends
};

#ifdef SHARED_BYTES
static_assert(sizeof(Shared) == SHARED_BYTES, "the launcher allocates something else");
#endif

__device__ __forceinline__ unsigned bits(__half2 value) {
    return *reinterpret_cast<unsigned*>(&value);
}
__device__ __forceinline__ unsigned bits(__nv_bfloat162 value) {
    return *reinterpret_cast<unsigned*>(&value);
}
__device__ __forceinline__ float2 as_floats_bf16(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Column x of a logit or weight row is row `tile_row(x)` of the tile, inside blocks of 16. A lane
// of p·v multiplies rows of columns 4q .. 4q + 3: their four neighbours in q have different row %
// 4, columns 2i and 2i + 1 differ by 2 mod 4.
__device__ __forceinline__ int tile_row(int x) {
    const int quarter = (x >> 2) & 3, i = x & 3;
    return (x & ~15) + 4 * i + (quarter ^ (2 * (i & 1)));
}
