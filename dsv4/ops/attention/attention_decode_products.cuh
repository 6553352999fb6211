// The products of attention_decode: logits q·k of a tile's rows, and values p·v.
#pragma once
#include "attention_decode_block.cuh"
#include "mma.cuh"

// 2^(code - 127 + QUERY_LOG2); NaN for codes beyond float32, which only rows with NaN or infinity
// have.
__device__ __forceinline__ float scale_factor(unsigned code) {
    return __uint_as_float(min((code + QUERY_LOG2) << 23, 0x7fc00000u));
}

// The A fragments of one group of q for this lane's two heads. A lane of a quad has 16 consecutive
// dimensions where keys are e4m3, and 8 in each half of the group where they are bf16.
struct QueryGroup {
    unsigned a[4][4];

    // Reads the fragments as bf16. `head` is the first of the lane's two; heads that do not exist
    // are zero.
    __device__ __forceinline__ void load(const bf16* q, int group, int head, int heads,
                                         bool codes) {
        const int quad = threadIdx.x % 4;
        const int first = group * 64 + (codes ? 16 : 8) * quad;
        const int second = first + (codes ? 8 : 32);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 low = make_uint4(0, 0, 0, 0), high = low;
            if (head + 8 * half < heads) {
                const bf16* row = q + (head + 8 * half) * DIM;
                low = *reinterpret_cast<const uint4*>(row + first);
                high = *reinterpret_cast<const uint4*>(row + second);
            }
            a[0][half] = low.x, a[0][half + 2] = low.y, a[1][half] = low.z, a[1][half + 2] = low.w;
            a[2][half] = high.x, a[2][half + 2] = high.y, a[3][half] = high.z,
            a[3][half + 2] = high.w;
        }
    }

    // bf16 to f16 times QUERY_SCALE, for e4m3 groups. Apart from load(), so that nothing waits for
    // the queries early.
    __device__ __forceinline__ void to_f16() {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 pair = as_floats_bf16(a[i][j]);
                a[i][j] = bits(__floats2half2_rn(pair.x * QUERY_SCALE, pair.y * QUERY_SCALE));
            }
        }
    }
};

// The B fragments of one group of this lane's key, as stored, and one of the four steps of its
// product.
template <bool CODES>
struct KeyGroup {
    unsigned words[CODES ? 4 : 8];

    __device__ __forceinline__ void load(const unsigned char* group) {
        const uint4 low = *reinterpret_cast<const uint4*>(group + 16 * (threadIdx.x % 4));
        words[0] = low.x, words[1] = low.y, words[2] = low.z, words[3] = low.w;
        if constexpr (!CODES) {
            const uint4 high = *reinterpret_cast<const uint4*>(group + 64 + 16 * (threadIdx.x % 4));
            words[4] = high.x, words[5] = high.y, words[6] = high.z, words[7] = high.w;
        }
    }

    __device__ __forceinline__ void multiply(float (&sum)[4], const QueryGroup& q, int i) const {
        if constexpr (CODES) {
            const uint2 values = e4m3x4_to_f16x4(words[i]);
            mma_f16(sum, q.a[i], values.x, values.y);
        } else {
            mma_bf16(sum, q.a[i], words[2 * i], words[2 * i + 1]);
        }
    }
};

// The two groups of q that a warp multiplies, and its products.
struct Query {
    QueryGroup groups[2];
    int pair = threadIdx.x / WARP / (2 * SPLIT);

    // `q`: of the token.
    __device__ __forceinline__ void load(const bf16* q, int first_head, int heads) {
        const int head = first_head + threadIdx.x % WARP / 4;
        groups[0].load(q, 2 * pair, head, heads, FP8);
        groups[1].load(q, 2 * pair + 1, head, heads, FP8 && pair < 3);
    }

    __device__ __forceinline__ void to_f16() {
        if (FP8) groups[0].to_f16();
        if (FP8 && pair < 3) groups[1].to_f16();
    }

    // logits[pair][head][column] = q · k over the two groups, for columns first_column .. padded -
    // 1.
    __device__ __forceinline__ void multiply(const unsigned char* stage, Shared& shared,
                                             int first_column, int padded) const {
        if constexpr (FP8) {
            if (pair < 3) {
                multiply_groups<true, true>(stage, shared, first_column, padded);
            } else {
                multiply_groups<true, false>(stage, shared, first_column, padded);
            }
        } else {
            multiply_groups<false, false>(stage, shared, first_column, padded);
        }
    }

    // Columns 8·half .. + 7 of every 16, of every SPLIT-th 16. Two blocks of columns at a time, so
    // that four sums are in flight.
    template <bool FIRST_CODES, bool SECOND_CODES>
    __device__ __forceinline__ void multiply_groups(const unsigned char* stage, Shared& shared,
                                                    int first_column, int padded) const {
        constexpr int STEP = 16 * SPLIT;
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const int half = warp % 2;
        const int part = warp / 2 % SPLIT;
        const int column = 8 * half + 2 * (lane % 4);
        const unsigned char* key =
            stage + tile_row(8 * half + lane / 4) * PITCH + (FP8 ? 128 : 256) * pair;
        const unsigned char* scale0 = stage + tile_row(column) * PITCH + ROW_BYTES + 2 * pair;
        const unsigned char* scale1 = stage + tile_row(column + 1) * PITCH + ROW_BYTES + 2 * pair;
        float* out = &shared.logits[pair][lane / 4][column];
        for (int block = first_column + 16 * part; block < padded; block += 2 * STEP) {
            // Without a second block the first is computed twice.
            const int blocks[2] = {block, block + STEP < padded ? block + STEP : block};
            KeyGroup<FIRST_CODES> first[2];
            KeyGroup<SECOND_CODES> second[2];
            unsigned codes0[2], codes1[2];
            float sums[2][2][4] = {};
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                first[b].load(key + blocks[b] * PITCH);
                second[b].load(key + blocks[b] * PITCH + (FIRST_CODES ? 64 : 128));
                if constexpr (FIRST_CODES) {
                    const int offset = blocks[b] * PITCH;
                    codes0[b] = *reinterpret_cast<const unsigned short*>(scale0 + offset);
                    codes1[b] = *reinterpret_cast<const unsigned short*>(scale1 + offset);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    first[b].multiply(sums[b][0], groups[0], i);
                    second[b].multiply(sums[b][1], groups[1], i);
                }
            }
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                float factors[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
                if constexpr (FIRST_CODES) {
                    factors[0][0] = scale_factor(codes0[b] & 0xff);
                    factors[0][1] = scale_factor(codes1[b] & 0xff);
                }
                if constexpr (SECOND_CODES) {
                    factors[1][0] = scale_factor(codes0[b] >> 8);
                    factors[1][1] = scale_factor(codes1[b] >> 8);
                }
                float logits[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    logits[i] =
                        sums[b][0][i] * factors[0][i % 2] + sums[b][1][i] * factors[1][i % 2];
                }
                *reinterpret_cast<float2*>(out + blocks[b]) = make_float2(logits[0], logits[1]);
                *reinterpret_cast<float2*>(out + 8 * LOGIT_PITCH + blocks[b]) =
                    make_float2(logits[2], logits[3]);
            }
        }
    }
};

// Weights of 16 keys for this lane's two heads, as the A fragment of a product.
template <typename Value>
__device__ __forceinline__ void load_weights(unsigned (&a)[4], const Value (*weights)[WEIGHT_PITCH],
                                             int block) {
    const int lane = threadIdx.x % WARP;
    const uint2 top = *reinterpret_cast<const uint2*>(&weights[lane / 4][block + 4 * (lane % 4)]);
    const uint2 bottom =
        *reinterpret_cast<const uint2*>(&weights[lane / 4 + 8][block + 4 * (lane % 4)]);
    a[0] = top.x, a[1] = bottom.x, a[2] = top.y, a[3] = bottom.y;
}

// sum[j] += p · v for e4m3 values at `group` of every row, of which this warp takes NTILES · 8 from
// `value` on: lane value NTILES · (lane / 4) + j in n-tile j.
__device__ __forceinline__ void weights_codes(float (&sum)[NTILES][4], const unsigned char* stage,
                                              int group, int value, const Shared& shared,
                                              int padded) {
    const int lane = threadIdx.x % WARP, quad = lane % 4;
#pragma unroll 2
    for (int block = 0; block < padded; block += 16) {
        unsigned a[4], codes[4][2];
        load_weights(a, shared.weights, block);
        const uint2 factors =
            *reinterpret_cast<const uint2*>(&shared.factors[group][block + 4 * quad]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned char* row = stage + (block + tile_row(4 * quad + i)) * PITCH;
            const unsigned char* at = row + 64 * group + value + NTILES * (lane / 4);
            if constexpr (NTILES == 8) {
                const uint2 both = *reinterpret_cast<const uint2*>(at);
                codes[i][0] = both.x, codes[i][1] = both.y;
            } else {
                codes[i][0] = *reinterpret_cast<const unsigned*>(at);
            }
            const unsigned factor = i < 2 ? factors.x : factors.y;
            a[i] = bits(__hmul2(*reinterpret_cast<const __half2*>(&a[i]),
                                *reinterpret_cast<const __half2*>(&factor)));
        }
#pragma unroll
        for (int j = 0; j < NTILES; j += 2) {
            const unsigned select = j % 4 ? 0x7362 : 0x5140;
            const uint2 low =
                e4m3x4_to_f16x4(__byte_perm(codes[0][j / 4], codes[1][j / 4], select));
            const uint2 high =
                e4m3x4_to_f16x4(__byte_perm(codes[2][j / 4], codes[3][j / 4], select));
            mma_f16(sum[j], a, low.x, high.x);
            mma_f16(sum[j + 1], a, low.y, high.y);
        }
    }
}

// The same for bf16 values, from byte `offset` of every row on.
__device__ __forceinline__ void weights_bf16(float (&sum)[NTILES][4], const unsigned char* stage,
                                             int offset, const Shared& shared, int padded) {
    const int lane = threadIdx.x % WARP, quad = lane % 4;
#pragma unroll 2
    for (int block = 0; block < padded; block += 16) {
        unsigned a[4], values[4][4];
        load_weights(a, shared.weights_bf16, block);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned char* at =
                stage + (block + tile_row(4 * quad + i)) * PITCH + offset + 2 * NTILES * (lane / 4);
            if constexpr (NTILES == 8) {
                const uint4 row = *reinterpret_cast<const uint4*>(at);
                values[i][0] = row.x, values[i][1] = row.y;
                values[i][2] = row.z, values[i][3] = row.w;
            } else {
                const uint2 row = *reinterpret_cast<const uint2*>(at);
                values[i][0] = row.x, values[i][1] = row.y;
            }
        }
#pragma unroll
        for (int j = 0; j < NTILES; ++j) {
            const unsigned select = j % 2 ? 0x7632 : 0x5410;
            const unsigned b0 = __byte_perm(values[0][j / 2], values[1][j / 2], select);
            const unsigned b1 = __byte_perm(values[2][j / 2], values[3][j / 2], select);
            mma_bf16(sum[j], a, b0, b1);
        }
    }
}

// Finds the largest scale code of `group` among the tile's rows and writes the factors of all
// columns relative to it. Every warp that needs them does this, those of one group alike.
__device__ __forceinline__ int relative_scales(Shared& shared, const unsigned char* stage,
                                               int group, int rows, int padded) {
    constexpr int STEPS = (TILE + WARP - 1) / WARP;
    int codes[STEPS], largest = 0;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int x = step * WARP + threadIdx.x % WARP;
        codes[step] =
            x < padded && tile_row(x) < rows ? stage[tile_row(x) * PITCH + ROW_BYTES + group] : 0;
        largest = max(largest, codes[step]);
    }
    largest = __reduce_max_sync(~0u, (unsigned)largest);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int x = step * WARP + threadIdx.x % WARP;
        // 2^(code - largest) in f16, or 0
        const unsigned short half = max(codes[step] - largest + 15, 0) << 10;
        if (x < padded) shared.factors[group][x] = __ushort_as_half(half);
    }
    __syncwarp();
    return largest;
}

// out = out · rescale + this tile's p · v, for the values of this warp.
__device__ __forceinline__ void weights_values(float (&out)[NTILES][4], const unsigned char* stage,
                                               const Shared& shared, int largest, int padded) {
    const int group = threadIdx.x / WARP / SPLIT;
    const int value = threadIdx.x / WARP % SPLIT * 8 * NTILES;
    const int head = threadIdx.x % WARP / 4;
    float sum[NTILES][4] = {}, factor = 1.0f / (1 << WEIGHT_LOG2);
    if (FP8 && group < 7) {
        weights_codes(sum, stage, group, value, shared, padded);
        factor = __int_as_float(max(largest - WEIGHT_LOG2, 0) << 23);
    } else {
        weights_bf16(sum, stage, (FP8 ? DIM - ROTARY : 128 * group) + 2 * value, shared, padded);
    }
    const float before[2] = {shared.rescale[head], shared.rescale[head + 8]};
#pragma unroll
    for (int j = 0; j < NTILES; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // With a single tile nothing came before, and `out` need not live through the other
            // phases.
            out[j][i] = sum[j][i] * factor + (STAGES == 1 ? 0.0f : out[j][i] * before[i / 2]);
        }
    }
}
