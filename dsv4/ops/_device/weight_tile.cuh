// Streams row tiles of a PackedWeight (dsv4/weights/packed.py) against up to 8 tokens, with
// mma.sync m16n8k16.
//
// A stage is 4 warp-wide 16-byte loads, 2048 bytes of codes: 16 rows × Stage<F>::COLUMNS columns
// (NVFP4, MXFP4: 256; FP8: 128; BF16: 64) and its block scales. One warp owns one stage slot of
// Stage<F>::BYTES bytes of shared memory (16-byte aligned) at a time; several slots make a private
// ring, so warps never wait for each other:
//
//     // The whole block, after pdl_wait():
//     stage_activations<T, NORM, is_f16(F), HELD, ...>(...);
//     float acc[accumulators(T)] = {};
//     // Weights may come before pdl_wait():
//     for (d < DEPTH) { stage_fetch<F, RAGGED>(slot d, ...); cp_async_commit(); }
//     for (stages) {
//         // This stage's bytes, also those of other lanes:
//         cp_async_wait<DEPTH - 1>(); __syncwarp();
//         stage_multiply<F, T>(slot, x_stage + lane_offset<T>(lane), acc);
//         // A commit even if nothing is left:
//         __syncwarp(); stage_fetch<F, RAGGED>(slot, stage + DEPTH); cp_async_commit();
//     }
//
// T, the tokens that there is room for (1 to 8), decides what a lane l = 4·g + t holds: for T ≤ 4
// tokens sit in the even columns of the MMA, acc[0] is (row g, token t) and acc[1] (row g + 8,
// token t); for more acc is {(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)}. Tokens from T on
// are not meaningful: their columns repeat another token's activations. The product is acc ·
// format_factor<F>() · inverse[token] (· global_scale), see stage_activations.
//
// f16 activations are exact: each token's row is brought to an amax in [2^14, 2^15) by a power of
// two, so that only values below 2^-29 of the row's largest lose bits. MXFP4 scale code 0 (2^-127)
// counts as 0, code 255 as infinity.
#pragma once
#include "cluster.cuh"
#include "mma.cuh"

// The codes of dsv4/launch/constants.py.
constexpr int NVFP4 = FORMAT_NVFP4;
constexpr int MXFP4 = FORMAT_MXFP4;
constexpr int FP8 = FORMAT_FP8;
constexpr int BF16 = FORMAT_BF16;
constexpr int TILE_ROWS = 16;
constexpr int STAGE_LOADS = 4;
constexpr int LOAD_BYTES = 512;
constexpr int STAGE_DATA = STAGE_LOADS * LOAD_BYTES;

constexpr __host__ __device__ bool is_f16(int format) { return format != BF16; }
// Whether a kernel for so many tokens knows their number when it is compiled: it then loads their
// rows without branches. Powers of two ask the launch, because a step of 4 tokens was slower
// otherwise.
constexpr __host__ __device__ bool knows_tokens(int tokens) { return (tokens & (tokens - 1)) != 0; }
constexpr __host__ __device__ int accumulators(int tokens) { return tokens > 4 ? 4 : 2; }

template <int F>
struct Stage {
    static constexpr int CHUNK = F == FP8 ? 32 : F == BF16 ? 16 : 64;  // columns of one load
    static constexpr int COLUMNS = STAGE_LOADS * CHUNK;
    static constexpr int CHUNK_SCALE = F == NVFP4   ? 64
                                       : F == MXFP4 ? 32
                                                    : 0;  // scale bytes of one load
    static constexpr int SCALE_BYTES = F == FP8 ? 16 : STAGE_LOADS * CHUNK_SCALE;
    static constexpr int BYTES = STAGE_DATA + SCALE_BYTES;
};

static_assert(Stage<NVFP4>::SCALE_BYTES == FORMAT_NVFP4_STAGE_SCALE_BYTES,
              "as the launchers count them");
static_assert(Stage<MXFP4>::SCALE_BYTES == FORMAT_MXFP4_STAGE_SCALE_BYTES,
              "as the launchers count them");
static_assert(Stage<FP8>::SCALE_BYTES == FORMAT_FP8_STAGE_SCALE_BYTES,
              "as the launchers count them");
static_assert(Stage<BF16>::SCALE_BYTES == FORMAT_BF16_STAGE_SCALE_BYTES,
              "as the launchers count them");

// Bytes of a stage of `format`; -1, no format: 0.
constexpr __host__ __device__ int stage_bytes(int format) {
    return format < 0        ? 0
           : format == NVFP4 ? Stage<NVFP4>::BYTES
           : format == MXFP4 ? Stage<MXFP4>::BYTES
           : format == FP8   ? Stage<FP8>::BYTES
                             : Stage<BF16>::BYTES;
}

// Bytes of a slot that a stage of either format fits into: whole lines, so that all slots of a ring
// begin on one.
constexpr __host__ __device__ int slot_bytes(int first, int second) {
    const int most =
        stage_bytes(first) > stage_bytes(second) ? stage_bytes(first) : stage_bytes(second);
    return (most + SLOT_LINE_BYTES - 1) / SLOT_LINE_BYTES * SLOT_LINE_BYTES;
}

// What the codes' f16 form lacks: 4-bit values are dequantized as value · 2^-14.
template <int F>
__device__ __forceinline__ float format_factor() {
    return F == NVFP4 || F == MXFP4 ? 16384.0f : 1.0f;
}

// Starts the copy of one stage into `slot` (shared address). `data`: the tile's first byte of this
// stage, that is data + (tile · K/CHUNK + stage · STAGE_LOADS) · LOAD_BYTES. `scale`: NVFP4 and
// MXFP4 block_scale + (tile · K/64 + stage · STAGE_LOADS) · CHUNK_SCALE, FP8 the float of (tile /
// 8, stage), BF16 unused. RAGGED: only `loads` of the 4 loads exist (K is not a multiple of
// COLUMNS), the others become zero.
template <int F, bool RAGGED>
__device__ __forceinline__ void stage_fetch(unsigned slot, const char* data, const char* scale,
                                            int lane, int loads = STAGE_LOADS) {
    // One address and constants behind it: the compiler would add the lane's part to each of them.
    const char* first = data + lane * 16;
    asm("" : "+l"(first));
#pragma unroll
    for (int i = 0; i < STAGE_LOADS; ++i) {
        const unsigned target = slot + i * LOAD_BYTES + lane * 16;
        const char* source = first + i * LOAD_BYTES;
        if (!RAGGED) cp_async16_once(target, source);
        else cp_async16_once(target, i < loads ? source : data, i < loads ? 16 : 0);
    }
    if (F == FP8) {
        if (lane == 0) cp_async4(slot + STAGE_DATA, scale);
    } else if (F == NVFP4 || F == MXFP4) {
        constexpr int LANES_PER_CHUNK = F == NVFP4 ? 4 : 2;
        if (lane < STAGE_LOADS * LANES_PER_CHUNK) {
            const unsigned target = slot + STAGE_DATA + lane * 16;
            const bool exists = !RAGGED || lane / LANES_PER_CHUNK < loads;
            if (!RAGGED) cp_async16_once(target, scale + lane * 16);
            else cp_async16_once(target, exists ? scale + lane * 16 : scale, exists ? 16 : 0);
        }
    }
}

// Byte offset of a lane's 16-byte unit inside the activations of 32 columns, which take 64 · T
// bytes. Lanes without a token read the units of one that is there, which a quarter of a warp then
// reads twice or alone: it costs no more banks.
template <int T>
__device__ __forceinline__ unsigned lane_offset(int lane) {
    const int group = lane / 4;
    const int token = T == 8 ? group : T > 4 ? min(group, T - 1) : (group / 2) % T;
    return (token * 4 + lane % 4) * 16;
}

// acc += d · (scale of row g, scale of row g + 8).
template <int T>
__device__ __forceinline__ void add_scaled(float (&acc)[accumulators(T)], const float (&d)[4],
                                           float low, float high) {
    if constexpr (T > 4) {
        acc[0] += d[0] * low;
        acc[1] += d[1] * low;
        acc[2] += d[2] * high;
        acc[3] += d[3] * high;
    } else {
        acc[0] += d[0] * low;
        acc[1] += d[2] * high;
    }
}

template <int T>
__device__ __forceinline__ void add_plain(float (&acc)[accumulators(T)], const float (&d)[4]) {
    if constexpr (T > 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[i] += d[i];
    } else {
        acc[0] += d[0];
        acc[1] += d[2];
    }
}

// The A fragment of one MMA step from a word of eight 4-bit codes, as value · 2^-14. Sign and
// magnitude of the last two pairs are shifted by different amounts, at once by a product with 2^a +
// 2^b where no stray copy carries into the kept bits. Masks cost more than shifts, which another
// unit takes as products: the two pairs share one, and the compiler must not give each shift its
// own.
__device__ __forceinline__ void dequantize4(unsigned word, unsigned (&a)[4]) {
    constexpr unsigned KEEP = 0x8E008E00;
    a[0] = word & KEEP;
    a[1] = (word << 3) & KEEP;
    unsigned others = word & 0x603F603F;
    asm("" : "+r"(others));
    a[2] = (others << 6 | others << 1) & KEEP;
    a[3] = (others * 516) & KEEP;
}

// The A fragment of one MMA step from two words of four 8-bit codes.
__device__ __forceinline__ void dequantize8(unsigned first, unsigned second, unsigned (&a)[4]) {
    const uint2 low = e4m3x4_to_f16x4(first), high = e4m3x4_to_f16x4(second);
    a[0] = low.x, a[1] = low.y, a[2] = high.x, a[3] = high.y;
}

// acc += 16 rows × COLUMNS columns of weights times the activations. `slot` and `x` are shared
// addresses; x points to the activations of the stage's first column plus lane_offset<T>(lane).
template <int F, int T>
__device__ __forceinline__ void stage_multiply(unsigned slot, unsigned x, int lane,
                                               float (&acc)[accumulators(T)]) {
    constexpr int X32 = 64 * T;  // bytes of 32 columns of activations
    if constexpr (F == NVFP4 || F == MXFP4) {
#pragma unroll STAGE_LOADS
        for (int chunk = 0; chunk < STAGE_LOADS; ++chunk) {
            const uint4 words = load_shared16(slot + chunk * LOAD_BYTES + lane * 16);
            const uint4 b0 = load_shared16(x + 2 * chunk * X32);
            const uint4 b1 = load_shared16(x + (2 * chunk + 1) * X32);
            const unsigned word[4] = {words.x, words.y, words.z, words.w};
            const unsigned b[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
            unsigned a[4];
            if constexpr (F == NVFP4) {
                const uint2 codes = load_shared8(slot + STAGE_DATA + chunk * 64 + lane / 4 * 8);
                const uint2 first = e4m3x4_to_f16x4(codes.x), second = e4m3x4_to_f16x4(codes.y);
                const unsigned scales[4] = {first.x, first.y, second.x, second.y};
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    dequantize4(word[s], a);
                    mma_f16(d, a, b[2 * s], b[2 * s + 1]);
                    const float2 scale = f16x2_to_floats(scales[s]);
                    add_scaled<T>(acc, d, scale.x, scale.y);
                }
            } else {
                const unsigned scales = load_shared4(slot + STAGE_DATA + chunk * 32 + lane / 4 * 4);
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                    for (int s = 2 * pair; s < 2 * pair + 2; ++s) {
                        dequantize4(word[s], a);
                        mma_f16(d, a, b[2 * s], b[2 * s + 1]);
                    }
                    const unsigned low = pair ? scales << 7 : scales << 23;
                    const unsigned high = pair ? scales >> 1 : scales << 15;
                    add_scaled<T>(acc, d, __uint_as_float(low & 0x7F800000),
                                   __uint_as_float(high & 0x7F800000));
                }
            }
        }
    } else if constexpr (F == FP8) {
        // Two chains of four MMAs, so that the next one need not wait for the last.
        float d[2][4] = {};
        const float scale = __uint_as_float(load_shared4(slot + STAGE_DATA));
#pragma unroll
        for (int chunk = 0; chunk < STAGE_LOADS; ++chunk) {
            const uint4 words = load_shared16(slot + chunk * LOAD_BYTES + lane * 16);
            const uint4 b = load_shared16(x + chunk * X32);
            unsigned first[4], second[4];
            dequantize8(words.x, words.y, first);
            dequantize8(words.z, words.w, second);
            mma_f16(d[0], first, b.x, b.y);
            mma_f16(d[1], second, b.z, b.w);
        }
        add_scaled<T>(acc, d[0], scale, scale);
        add_scaled<T>(acc, d[1], scale, scale);
    } else {
        float d[2][4] = {};
#pragma unroll
        for (int chunk = 0; chunk < STAGE_LOADS; chunk += 2) {
            const uint4 first = load_shared16(slot + chunk * LOAD_BYTES + lane * 16);
            const uint4 second = load_shared16(slot + (chunk + 1) * LOAD_BYTES + lane * 16);
            const uint4 b = load_shared16(x + chunk / 2 * X32);
            const unsigned a0[4] = {first.x, first.y, first.z, first.w};
            const unsigned a1[4] = {second.x, second.y, second.z, second.w};
            mma_bf16(d[0], a0, b.x, b.y);
            mma_bf16(d[1], a1, b.z, b.w);
        }
        add_plain<T>(acc, d[0]);
        add_plain<T>(acc, d[1]);
    }
}

// load_columns where the 16 bytes are not aligned or not all there: rare, so kept out of the way of
// the instruction cache.
__device__ __noinline__ uint4 load_columns_one_by_one(const bf16* row, int first, int columns) {
    uint4 value = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
        const unsigned bits = first + i < columns ? __bfloat16_as_ushort(row[first + i]) : 0;
        const unsigned shifted = bits << (i % 2 * 16);
        value.x |= i / 2 == 0 ? shifted : 0, value.y |= i / 2 == 1 ? shifted : 0;
        value.z |= i / 2 == 2 ? shifted : 0, value.w |= i / 2 == 3 ? shifted : 0;
    }
    return value;
}

// Columns first … first + 7 of a row; zeros beyond `columns`. ALIGNED: every row starts on 16
// bytes, and `columns` are a multiple of 8.
template <bool ALIGNED>
__device__ __forceinline__ uint4 load_columns(const bf16* row, int first, int columns) {
    if (first >= columns) return make_uint4(0, 0, 0, 0);
    if (ALIGNED) return *reinterpret_cast<const uint4*>(row + first);
    return load_columns_one_by_one(row, first, columns);
}

__device__ __forceinline__ float bf16_low(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float bf16_high(unsigned word) {
    return __uint_as_float(word & 0xFFFF0000);
}

// Norm weights of columns first … first + 7; zeros beyond `columns`. ALIGNED as in load_columns.
template <bool ALIGNED>
__device__ __forceinline__ void load_norm_weight(const float* weight, int first, int columns,
                                                 float (&values)[8]) {
    if (ALIGNED && first < columns) {
        const float4 low = *reinterpret_cast<const float4*>(weight + first);
        const float4 high = *reinterpret_cast<const float4*>(weight + first + 4);
        values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
        values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = first + i < columns ? weight[first + i] : 0.0f;
    }
}

// The power of two (as float bits) that brings `amax` into [2^14, 2^15); its inverse is a normal
// number as well.
__device__ __forceinline__ unsigned activation_factor(float amax) {
    const int exponent = __float_as_uint(amax) >> 23 & 0xFF;
    return static_cast<unsigned>(min(max(268 - exponent, 1), 253)) << 23;
}

constexpr __host__ __device__ int activation_bytes(int tokens, int padded_columns) {
    return 2 * tokens * padded_columns;
}

// Where 8 columns of a token lie: word i (columns first + 2i and + 1) is at offset 16 · i bytes.
template <int T>
__device__ __forceinline__ char* activation_words(char* target, int first, int token) {
    return target + (first / 32 * T + token) * 64 + first % 32 / 8 * 4;
}

// Which of its four words a lane stores first, of columns 8 · lane of one of T tokens: words of the
// same number lie in few banks, and units of neighbouring 32 columns in both halves of the banks
// where T is odd.
template <int T>
__device__ __forceinline__ int store_turn(int lane) {
    return (T % 2 ? lane / 8 : lane / 4) % 4;
}

// values[s] = values[(s + turn) % 4].
__device__ __forceinline__ void rotate(unsigned (&values)[4], int turn) {
    if (turn & 1) {
        const unsigned first = values[0];
        values[0] = values[1], values[1] = values[2], values[2] = values[3], values[3] = first;
    }
    if (turn & 2) {
        const unsigned first = values[0], second = values[1];
        values[0] = values[2], values[1] = values[3], values[2] = first, values[3] = second;
    }
}

// Rows x + token · row_stride in memory, of `tokens` tokens. ALIGNED: see load_columns.
template <bool ALIGNED>
struct StoredRows {
    const bf16* x;
    int64 row_stride;
    int tokens, columns;

    // pieces[b][n] = columns first + b · stride … + 7 of token n; zeros where there are none.
    template <int HELD, int T>
    __device__ __forceinline__ void load(uint4 (&pieces)[HELD][T], int first, int stride) const {
#pragma unroll
        for (int b = 0; b < HELD; ++b) {
#pragma unroll
            for (int n = 0; n < T; ++n) {
                pieces[b][n] = make_uint4(0, 0, 0, 0);
                if (n < tokens)
                    pieces[b][n] =
                        load_columns<ALIGNED>(x + n * row_stride, first + b * stride, columns);
            }
        }
    }
};

// Puts columns [0, columns) of the rows of `source` into shared memory `target`
// (activation_bytes(T, padded_columns), 16-byte aligned) in the order of the B fragments: the
// 16-byte unit t of 32 columns b and token n is number (b · T + n) · 4 + t and holds columns 2t,
// 2t + 1 of each 8 columns. Columns up to padded_columns (a multiple of 32) and tokens up to T
// become zero. IS_F16: f16 values times a power of two per token whose inverse goes to
// inverse[token]; otherwise bf16 and inverse = 1. NORM: the row is rms-normalised over `columns`,
// times norm_weight, and rounded to bf16 first. HELD: 16-byte loads in flight per thread and token;
// WHOLE: they are all of the row, which is then read once, else twice. ALIGNED: see load_columns.
// `scratch`: 2 · T · 32 floats. Every one of the THREADS of the block calls it; it ends with a
// barrier.
template <int T, bool NORM, bool IS_F16, int HELD, bool WHOLE, bool ALIGNED, int THREADS,
          typename Source>
__device__ __forceinline__ void stage_activations(const Source& source, int columns,
                                                  int padded_columns,
                                                  const float* norm_weight, float eps, char* target,
                                                  float* inverse, float* scratch) {
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    constexpr int BLOCK_WARPS = THREADS / WARP, STRIDE = THREADS * 8;
    uint4 pieces[HELD][T];
    float norms[T], factors[T];
#pragma unroll
    for (int n = 0; n < T; ++n) norms[n] = factors[n] = 1.0f;
    if constexpr (NORM || IS_F16) {
        float squares[T] = {}, amax[T] = {};
        // without a norm: two bf16 magnitudes, which compare like integers
        unsigned packed_amax[T] = {};
        for (int base = threadIdx.x * 8; base < padded_columns; base += HELD * STRIDE) {
            source.load(pieces, base, STRIDE);
#pragma unroll
            for (int b = 0; b < HELD; ++b) {
                float weights[8];
                if (NORM)
                    load_norm_weight<ALIGNED>(norm_weight, base + b * STRIDE, columns, weights);
#pragma unroll
                for (int n = 0; n < T; ++n) {
                    const unsigned words[4] = {pieces[b][n].x, pieces[b][n].y, pieces[b][n].z,
                                               pieces[b][n].w};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (NORM) {
                            const float low = bf16_low(words[i]);
                            const float high = bf16_high(words[i]);
                            squares[n] += low * low + high * high;
                            amax[n] = fmaxf(amax[n], fmaxf(fabsf(low * weights[2 * i]),
                                                           fabsf(high * weights[2 * i + 1])));
                        } else {
                            packed_amax[n] = __vmaxu2(packed_amax[n], words[i] & 0x7FFF7FFF);
                        }
                    }
                }
            }
            if (WHOLE) break;
        }
#pragma unroll
        for (int n = 0; n < T; ++n) {
            if (!NORM)
                amax[n] = __uint_as_float(max(packed_amax[n] << 16, packed_amax[n] & 0xFFFF0000));
            const float largest = warp_max_magnitude(amax[n]);
            if (NORM) squares[n] = warp_sum(squares[n]);
            if (lane == 0) {
                scratch[n * WARP + warp] = largest;
                if (NORM) scratch[(T + n) * WARP + warp] = squares[n];
            }
        }
        __syncthreads();
        // Every warp adds up for itself, which saves a barrier.
#pragma unroll
        for (int n = 0; n < T; ++n) {
            float largest =
                warp_max_magnitude(lane < BLOCK_WARPS ? scratch[n * WARP + lane] : 0.0f);
            if (NORM) {
                const float part = lane < BLOCK_WARPS ? scratch[(T + n) * WARP + lane] : 0.0f;
                norms[n] = rsqrtf(warp_sum(part) / columns + eps);
                largest *= norms[n];
            }
            if (IS_F16) factors[n] = __uint_as_float(activation_factor(largest));
        }
    }
    if (threadIdx.x == 0) {
#pragma unroll
        for (int n = 0; n < T; ++n)
            inverse[n] = __uint_as_float((254u << 23) - __float_as_uint(factors[n]));
    }
    const int turn = store_turn<T>(lane);
    for (int base = threadIdx.x * 8; base < padded_columns; base += HELD * STRIDE) {
        if (!WHOLE || !(NORM || IS_F16)) source.load(pieces, base, STRIDE);
#pragma unroll
        for (int b = 0; b < HELD; ++b) {
            const int first = base + b * STRIDE;
            if (first >= padded_columns) break;
            float weights[8];
            if (NORM) load_norm_weight<ALIGNED>(norm_weight, first, columns, weights);
#pragma unroll
            for (int n = 0; n < T; ++n) {
                unsigned words[4] = {pieces[b][n].x, pieces[b][n].y, pieces[b][n].z,
                                     pieces[b][n].w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (NORM) {
                        const __nv_bfloat162 rounded = __floats2bfloat162_rn(
                            bf16_low(words[i]) * norms[n] * weights[2 * i],
                            bf16_high(words[i]) * norms[n] * weights[2 * i + 1]);
                        words[i] = *reinterpret_cast<const unsigned*>(&rounded);
                    }
                    if (IS_F16) {
                        const __half2 scaled = __floats2half2_rn(bf16_low(words[i]) * factors[n],
                                                                 bf16_high(words[i]) * factors[n]);
                        words[i] = *reinterpret_cast<const unsigned*>(&scaled);
                    }
                }
                rotate(words, turn);
                char* unit = activation_words<T>(target, first, n);
#pragma unroll
                for (int s = 0; s < 4; ++s)
                    *reinterpret_cast<unsigned*>(unit + (s + turn) % 4 * 16) = words[s];
            }
        }
        if (WHOLE) break;
    }
    __syncthreads();
}
