// Shared by the prefill attention kernels: which keys a token sees, how their rows are gathered
// into shared memory, and the rotation of the result.
//
// One block (or work unit) is one token and HEADS heads: all heads of a token share one key = value
// row per slot, so the heads are the rows of the matrix products and 64 gathered keys at a time are
// the columns, or the other way round where the heads are few.
//
// Shared tiles are column blocks of 64 bf16: block b of a tile is `rows` lines of 128 bytes, line r
// holding columns 64b .. 64b + 63 of row r, its 16-byte chunks permuted by r & 7 (the 128-byte
// swizzle that wgmma reads and that makes ldmatrix free of bank conflicts in both directions).
#pragma once
#include "kv_rows.cuh"
#include "ptx.cuh"
#include "rope.cuh"
#include <math_constants.h>

#ifndef DIM
#define DIM 512
#endif
#ifndef ROPE
#define ROPE 64
#endif
#ifndef HEADS
#define HEADS 64  // per work unit
#endif

constexpr int TILE = 64;                 // keys per tile
constexpr int COLUMN_BLOCKS = DIM / 64;  // of 128 bytes
constexpr int BLOCK_BYTES = 64 * 128;    // one column block of 64 rows
constexpr int QUERY_BLOCK_BYTES = HEADS * 128;
constexpr int TILE_BYTES = COLUMN_BLOCKS * BLOCK_BYTES;
#define NO_LOGIT (-CUDART_INF_F)
constexpr float LOG2_E = 1.4426950408889634f;
// A row's running maximum is raised, and its sums are rescaled, only when a logit exceeds it by
// this power of two: weights stay below 2^8, where bf16 and float32 are as precise as below 1.
constexpr float PEAK_SLACK = 8.0f;
static_assert(DIM % 64 == 0 && DIM <= 512 && ROPE % 2 == 0 && ROPE <= 64,
              "unsupported head geometry");

struct Keys {
    const bf16* ring;
    const bf16* compressed;  // null: none
    const int64* selected;   // null: all complete entries
    int ring_slots, compressed_slots, listed, ratio, window;
};

// What one token sees: `window_keys` consecutive tokens from ring slot `first_slot` on, then
// compressed entries: those of `list`, which may hold -1s, or the first ones. The window comes
// first, so the first tile always has a key.
struct Seen {
    int first_slot, window_keys, keys;
    const int64* list;
};

__device__ __forceinline__ Seen seen_by(const Keys& keys, int token, int64 position) {
    Seen seen;
    seen.window_keys = (int)min(position + 1, (int64)keys.window);
    seen.first_slot = (unsigned)(position + 1 - seen.window_keys) % (unsigned)keys.ring_slots;
    seen.list = keys.selected ? keys.selected + (int64)token * keys.listed : nullptr;
    seen.keys = seen.window_keys;
    if (seen.list) seen.keys += keys.listed;
    else if (keys.compressed)
        seen.keys +=
            min((unsigned)(position + 1) / (unsigned)keys.ratio, (unsigned)keys.compressed_slots);
    return seen;
}

__device__ __forceinline__ unsigned swizzled(int row, int chunk) {
    return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Reads *source if `take`, else gives `otherwise`; without a branch, so that several reads overlap.
__device__ __forceinline__ int read_entry(const int64* source, bool take, int otherwise) {
    int64 value;
    asm("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nmov.b64 %0, %2;\n@p ld.global.b64 %0, [%1];\n}"
        : "=&l"(value)
        : "l"(source), "l"((int64)otherwise), "r"((unsigned)take));
    return (int)value;
}

// The rows of one tile that a thread copies a part of, eight threads per row: compressed entries,
// negative for none.
template <int threads>
struct TileRows {
    static constexpr int passes = TILE * 8 / threads;
    int entry[passes];

    __device__ __forceinline__ void find(const Seen& seen, int first_key, int thread) {
#pragma unroll
        for (int pass = 0; pass < passes; pass++) {
            const int index = first_key + pass * (threads / 8) + thread / 8 - seen.window_keys;
            const bool exists = index < seen.keys - seen.window_keys;
            entry[pass] = read_entry(seen.list + index, exists && index >= 0 && seen.list,
                                     exists ? index : -1);
        }
    }

    __device__ __forceinline__ bool takes(const Seen& seen, int first_key, int thread,
                                          int pass) const {
        return first_key + pass * (threads / 8) + thread / 8 < seen.window_keys || entry[pass] >= 0;
    }

    // Whether any row of this thread has a key.
    __device__ __forceinline__ bool any(const Seen& seen, int first_key, int thread) const {
        bool any = false;
#pragma unroll
        for (int pass = 0; pass < passes; pass++) any |= takes(seen, first_key, thread, pass);
        return any;
    }

    // Copies `blocks` column blocks from `first_column` on. Rows without a key become zeros: their
    // weight is 0, and 0 times a stale NaN would not be. `mask` (see TileMask) says which rows have
    // one.
    template <int blocks>
    __device__ __forceinline__ void gather(unsigned tile, unsigned char* mask, const Keys& keys,
                                           const Seen& seen, int first_key, int first_column,
                                           int thread) const {
        const int chunk = thread % 8;
#pragma unroll
        for (int pass = 0; pass < passes; pass++) {
            const int row = pass * (threads / 8) + thread / 8;
            const bool windowed = first_key + row < seen.window_keys;
            const bool take = takes(seen, first_key, thread, pass);
            const unsigned four = __ballot_sync(~0u, take) & 0x01010101u;
            if (thread % WARP == 0) mask[row / 4] = four * 0x01020408u >> 24;
            int slot = seen.first_slot + first_key + row;
            if (slot >= keys.ring_slots) slot -= keys.ring_slots;
            const bf16* source = windowed || !take ? keys.ring : keys.compressed;
            const int row_slot = windowed ? slot : take ? entry[pass] : 0;
            source += (int64)row_slot * DIM + first_column + chunk * 8;
            const unsigned target = tile + swizzled(row, chunk);
#pragma unroll
            for (int block = 0; block < blocks; block++)
                copy_or_zero<16>(target + block * BLOCK_BYTES, source + block * 64, take);
        }
    }
};

// Which of 64 keys exist, as shared memory holds it: byte i has one bit for each of keys 4i .. 4i
// + 3.
struct TileMask {
    unsigned words[4];

    __device__ __forceinline__ explicit TileMask(const unsigned char* mask) {
        const uint4 value = *reinterpret_cast<const uint4*>(mask);
        words[0] = value.x, words[1] = value.y, words[2] = value.z, words[3] = value.w;
    }
    __device__ __forceinline__ bool full() const {
        return (words[0] & words[1] & words[2] & words[3]) == 0x0f0f0f0fu;
    }
    // Key 8 n + 2 (lane % 4) + i: where a thread's logits stand in the result of a matrix product.
    __device__ __forceinline__ bool has(int n, int i, int lane) const {
        const int shift = (lane >> 1 & 1) * 8 + (lane & 1) * 2;
        return words[n / 2] >> shift >> (n % 2 * 16 + i) & 1;
    }
};

// `blocks` column blocks of the queries of HEADS heads of one token, from `first` on; heads beyond
// `count` become zeros. Head i goes to row i ^ `exchange`.
template <int threads, int blocks>
__device__ __forceinline__ void load_queries(unsigned tile, const bf16* first, int count,
                                             int exchange, int thread) {
    const int chunk = thread % 8;
#pragma unroll
    for (int pass = 0; pass < HEADS * 8 / threads; pass++) {
        const int row = pass * (threads / 8) + thread / 8;
        const bool take = row < count;
        const bf16* source = first + (take ? row : 0) * DIM + chunk * 8;
        const unsigned target = tile + swizzled(row ^ exchange, chunk);
#pragma unroll
        for (int block = 0; block < blocks; block++)
            copy_or_zero<16>(target + block * QUERY_BLOCK_BYTES, source + block * 64, take);
    }
}

__device__ __forceinline__ unsigned packed_bits(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// The inverse rotation at `position`, for pairs 0 .. ROPE / 2 - 1.
__device__ __forceinline__ void output_turns(Turn* turns, const float* inv_freq, int64 position,
                                             int thread) {
    if (thread < ROPE / 2) turns[thread] = conjugate(rope_turn(position, inv_freq[thread]));
}

// Two neighbouring results of a head, columns `column`, `column + 1` of the last column block:
// rotated back if rotary, and rounded again, as torch does.
__device__ __forceinline__ unsigned rotated(unsigned pair, int column, const Turn* turns) {
    if (column < 64 - ROPE) return pair;
    const float2 turned = rotate(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u),
                                 turns[(column - (64 - ROPE)) / 2]);
    return packed_bits(turned.x, turned.y);
}

// The same of results that are not rounded yet.
__device__ __forceinline__ unsigned rotated(float a, float b, int column, const Turn* turns) {
    return rotated(packed_bits(a, b), column, turns);
}

__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

// The running maximum after logits up to `highest`; `peak` is -inf before the first tile.
__device__ __forceinline__ float raised_peak(float peak, float highest) {
    return highest > peak + PEAK_SLACK ? highest : peak;
}

__device__ __forceinline__ void store_shared(unsigned address, unsigned value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
