// Products of stages of weights with the activations of a step by mma.sync m16n8k16, two row tiles
// at a time.
//
// 4-bit weights have a scale for every block of 16 (NVFP4) or 32 (MXFP4) columns of a row, which
// goes onto the float32 sum of the block. One or two tokens leave columns of the MMA free: there a
// token has SPREAD of them, and neighbouring blocks take them in turn. While it is a block's turn
// its column gets the activations and the token's others get zeros. So one chain of MMAs sums up
// SPREAD blocks side by side, and a lane scales the two of them that it holds, where it would have
// scaled all of them.
//
// The order of summation is the same for any number of tokens: of all blocks that a warp sums up,
// the first two of every four are one chain, the last two the other. Zeros change no sum. Weights
// of 8 and 16 bits are the first chain.
//
// Defines: those of moe_decode.cu.
#pragma once
#include "moe_shape.cuh"
#include "ptx.cuh"
#include "weight_tile.cuh"

constexpr bool is_4_bit(int format) { return format == NVFP4 || format == MXFP4; }
constexpr bool ANY_4_BIT = is_4_bit(ROUTED) || is_4_bit(SHARED);

// Columns of the MMA that a token has; 1: there are none to spare. Eight for a single token would
// be four chains, which cost steps of five tokens and more what they save here.
constexpr int SPREAD = TOKENS <= 2 ? 4 : 1;
constexpr bool SPREADS = SPREAD > 1;
// Three and four tokens sit in the even columns of the MMA, so that only two of its four results
// per lane are live.
constexpr bool EVEN_COLUMNS = TOKENS == 3 || TOKENS == 4;
constexpr int LANE_TOKENS = TOKENS > 4 ? 2 : 1;
// Neighbouring lanes that hold a token together, each with a chain of its own.
constexpr int TOKEN_LANES = SPREADS ? 2 : 1;
constexpr int LANE_CHAINS = ANY_4_BIT && !SPREADS ? 2 : 1;

// ---- activations --------------------------------------------------------------------------------

// The activations of a token and 32 columns are 64 bytes: in their order where blocks take turns,
// else 16 bytes for each of four lanes, the B fragments of two MMAs. Where in them the word of the
// columns 2 `pair` and 2 `pair` + 1 begins.
__device__ __forceinline__ int word_at(int pair) {
    return SPREADS ? 4 * pair : pair % 4 * 16 + pair / 4 * 4;
}

// The token whose activations a lane reads.
__device__ __forceinline__ int lane_token(int lane) {
    return SPREADS ? lane % 8 / SPREAD : EVEN_COLUMNS ? lane >> 3 : lane >> 2;
}

// The part of 32 columns that a lane reads: where blocks take turns, eight columns for ldmatrix.
__device__ __forceinline__ int lane_part(int lane) { return (SPREADS ? lane >> 3 : lane & 3) * 16; }

// 16-byte units of zeros that are read like the activations of a stage, where blocks take turns.
constexpr int ZEROS = SPREADS ? STAGE_COLUMNS * 2 * TOKENS / 16 : 1;

// The activations that are multiplied with a stage.
struct Activations {
    // Of the lane's part of the first 32 columns, and of zeros.
    unsigned address, zeros;
    // Bytes from 32 columns to the next ones.
    int stride;
    // Whether the lane's token goes to the expert.
    bool valid;

    // Where the lane reads while it is its column's turn, or is not.
    __device__ __forceinline__ unsigned at(bool turn) const {
        return SPREADS && !((TOKENS == 1 || valid) && turn) ? zeros : address;
    }

    // The B fragments of two MMAs, of the 32 columns from 32 `k32` on; `from`: at(...).
    __device__ __forceinline__ uint4 read(unsigned from, int k32) const {
        const unsigned here = from + k32 * (TOKENS == 1 ? 64 : stride);
        if (SPREADS) return load_matrices(here);
        return valid ? load_shared16(here) : make_uint4(0, 0, 0, 0);
    }
};

// ---- products -----------------------------------------------------------------------------------

// 2^(code - 127); code 0 is a subnormal. Code 255 (a NaN in the format) gives infinity.
__device__ __forceinline__ float decode_e8m0(unsigned code) {
    return __uint_as_float(max(code << 23, 1u << 22));
}

// The scales of two blocks, of each those of row g and of row g + 8.
template <int FORMAT>
__device__ __forceinline__ void decode_scales(unsigned codes, float2& first, float2& second) {
    if constexpr (FORMAT == NVFP4) {
        const uint2 halves = e4m3x4_to_f16x4(codes);
        first = f16x2_to_floats(halves.x), second = f16x2_to_floats(halves.y);
    } else {
        first = make_float2(decode_e8m0(codes & 255), decode_e8m0(codes >> 8 & 255));
        second = make_float2(decode_e8m0(codes >> 16 & 255), decode_e8m0(codes >> 24));
    }
}

// What a warp has summed up: of two row tiles.
struct Sums {
    // Of a chain rows g and g + 8 of the lane's token, or both rows of two tokens.
    float chains[2][LANE_CHAINS][2][LANE_TOKENS];

    // Results of an MMA. Of a lane with one token the second column says nothing.
    __device__ __forceinline__ void add(int tile, int chain, const float (&d)[4], float low,
                                        float high) {
#pragma unroll
        for (int t = 0; t < LANE_TOKENS; ++t) {
            float(&rows)[2][LANE_TOKENS] = chains[tile][chain];
            rows[0][t] = fmaf(d[t], low, rows[0][t]);
            rows[1][t] = fmaf(d[2 + t], high, rows[1][t]);
        }
    }

    // Results of an MMA in which a lane's columns are two blocks of its token.
    __device__ __forceinline__ void add_blocks(int tile, const float (&d)[4], float2 first,
                                               float2 second) {
        float(&rows)[2][LANE_TOKENS] = chains[tile][0];
        rows[0][0] = fmaf(d[1], second.x, fmaf(d[0], first.x, rows[0][0]));
        rows[1][0] = fmaf(d[3], second.y, fmaf(d[2], first.y, rows[1][0]));
    }

    // The sum of both chains, on the first of a token's lanes.
    __device__ __forceinline__ float total(int tile, int row, int token) const {
        const float sum = chains[tile][0][row][token];
        if constexpr (LANE_CHAINS == 2) return sum + chains[tile][1][row][token];
        return ANY_4_BIT ? sum + __shfl_xor_sync(~0u, sum, 1) : sum;
    }
};

// sums += a stage of 4-bit weights, whose blocks take turns.
template <int FORMAT>
__device__ __forceinline__ void multiply_in_turn(Sums& sums, unsigned slot, const Activations& x,
                                                 int lane) {
    // Until it is the first block's turn again.
    constexpr int BLOCK = FORMAT == NVFP4 ? 16 : 32, COLUMNS = SPREAD * BLOCK;
    constexpr int LOADS = COLUMNS / Stage<FORMAT>::CHUNK;
    // Of the round the lane holds blocks 2 (lane % 4) % SPREAD and the next one.
    const int own = 2 * lane % SPREAD * BLOCK / Stage<FORMAT>::CHUNK * Stage<FORMAT>::CHUNK_SCALE +
                    2 * lane % SPREAD * BLOCK % Stage<FORMAT>::CHUNK / BLOCK * 2;
    const unsigned scales =
        slot + STAGE_DATA + own + (lane >> 2) * (Stage<FORMAT>::CHUNK_SCALE / 8);
    // ldmatrix reads 16 columns for lanes 0 to 15 and the next 16 for the others.
    constexpr int TURNS = COLUMNS / 32;
    unsigned from[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i)
        from[i] = x.at((i * 32 + (lane >> 4) * 16) / BLOCK == lane % SPREAD);
#pragma unroll
    for (int round = 0; round < STAGE_LOADS / LOADS; ++round) {
        uint4 b[TURNS];
#pragma unroll
        for (int i = 0; i < TURNS; ++i) b[i] = x.read(from[i], round * TURNS + i);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int load = 0; load < LOADS; ++load) {
                const uint4 words = load_shared16(slot + tile * TILE_BYTES +
                                                  (round * LOADS + load) * LOAD_BYTES + lane * 16);
                const uint4 &first = b[2 * load], &second = b[2 * load + 1];
                unsigned a[4];
                dequantize4(words.x, a);
                mma_f16(d, a, first.x, first.y);
                dequantize4(words.y, a);
                mma_f16(d, a, first.z, first.w);
                dequantize4(words.z, a);
                mma_f16(d, a, second.x, second.y);
                dequantize4(words.w, a);
                mma_f16(d, a, second.z, second.w);
            }
            const unsigned codes = load_shared4(scales + tile * TILE_BYTES +
                                                round * (LOADS * Stage<FORMAT>::CHUNK_SCALE));
            float2 first, second;
            decode_scales<FORMAT>(codes, first, second);
            sums.add_blocks(tile, d, first, second);
        }
    }
}

// sums += a stage of 4-bit weights, a block at a time.
template <int FORMAT>
__device__ __forceinline__ void multiply_blocks(Sums& sums, unsigned slot, const Activations& x,
                                                int lane) {
    static_assert(LOADS_AT_ONCE % 2 == 0, "both chains in a turn of the loop");
    constexpr int BLOCK_STEPS = FORMAT == NVFP4 ? 1 : 2, LOAD_BLOCKS = 4 / BLOCK_STEPS;
    const unsigned from = x.at(true);
#pragma unroll LOADS_AT_ONCE
    for (int load = 0; load < STAGE_LOADS; ++load) {
        const unsigned at = slot + load * LOAD_BYTES + lane * 16;
        const uint4 words[2] = {load_shared16(at), load_shared16(at + TILE_BYTES)};
        const uint4 low = x.read(from, 2 * load), high = x.read(from, 2 * load + 1);
        const unsigned b[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const unsigned word[4] = {words[tile].x, words[tile].y, words[tile].z, words[tile].w};
            const unsigned scales = slot + tile * TILE_BYTES + STAGE_DATA +
                                    load * Stage<FORMAT>::CHUNK_SCALE +
                                    (lane >> 2) * (Stage<FORMAT>::CHUNK_SCALE / 8);
            float2 scale[LOAD_BLOCKS];
            if constexpr (FORMAT == NVFP4) {
                const uint2 codes = load_shared8(scales);
                decode_scales<FORMAT>(codes.x, scale[0], scale[1]);
                decode_scales<FORMAT>(codes.y, scale[2], scale[3]);
            } else {
                decode_scales<FORMAT>(load_shared4(scales), scale[0], scale[1]);
            }
#pragma unroll
            for (int block = 0; block < LOAD_BLOCKS; ++block) {
                float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < BLOCK_STEPS; ++i) {
                    const int step = block * BLOCK_STEPS + i;
                    unsigned a[4];
                    dequantize4(word[step], a);
                    mma_f16(d, a, b[2 * step], b[2 * step + 1]);
                }
                const int chain = (load * LOAD_BLOCKS + block) / 2 % 2;
                sums.add(tile, chain, d, scale[block].x, scale[block].y);
            }
        }
    }
}

// sums += a stage of weights of 8 or 16 bits.
template <int FORMAT>
__device__ __forceinline__ void multiply_plain(Sums& sums, unsigned slot, const Activations& x,
                                               int lane) {
    const unsigned from = x.at(lane % SPREAD == 0);
    float d[2][4] = {};
#pragma unroll LOADS_AT_ONCE
    for (int load = 0; load < STAGE_LOADS; ++load) {
        const unsigned at = slot + load * LOAD_BYTES + lane * 16;
        const uint4 words[2] = {load_shared16(at), load_shared16(at + TILE_BYTES)};
        const uint4 b = x.read(from, FORMAT == FP8 ? load : load / 2);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const uint4& w = words[tile];
            if constexpr (FORMAT == FP8) {
                unsigned first[4], second[4];
                dequantize8(w.x, w.y, first);
                dequantize8(w.z, w.w, second);
                mma_f16(d[tile], first, b.x, b.y);
                mma_f16(d[tile], second, b.z, b.w);
            } else {
                const unsigned a[4] = {w.x, w.y, w.z, w.w};
                mma_bf16(d[tile], a, load & 1 ? b.z : b.x, load & 1 ? b.w : b.y);
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        float unit = 1.0f;
        if constexpr (FORMAT == FP8)
            unit = __uint_as_float(load_shared4(slot + tile * TILE_BYTES + STAGE_DATA));
        sums.add(tile, 0, d[tile], unit, unit);
    }
}

// sums += both row tiles of one stage times activations.
template <int FORMAT>
__device__ __forceinline__ void multiply_stage(Sums& sums, unsigned slot, const Activations& x,
                                               int lane) {
    if constexpr (!is_4_bit(FORMAT)) multiply_plain<FORMAT>(sums, slot, x, lane);
    else if constexpr (SPREADS) multiply_in_turn<FORMAT>(sums, slot, x, lane);
    else multiply_blocks<FORMAT>(sums, slot, x, lane);
}
