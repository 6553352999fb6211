// Hyper-connection mixes of many tokens: hc_post arithmetic if asked for, then fn · x and Σ x² of
// the (rounded) streams.
//
// Defines: STREAMS (M ≤ 4), MIXES (rows of fn), POST (1: mix y into the streams first, 0: read
// them), SPLITS of the columns over blocks, SHARED_BYTES of dynamic shared memory, OWNERS (ranks
// that share the tokens, exchange.cuh). A block has 16 tokens; lane / 4 is a token of the first
// and, in `half` 1, of the second eight.
//
// The products run on the tensor cores and keep float32 accuracy: the streams are bf16, so exact in
// tf32; fn is the sum of two tf32 numbers up to 2⁻²⁰ of itself, and sums leave the tensor core
// every CHUNK columns. A lane's fragments hold 8 neighbouring columns, which permutes the summation
// index of both operands alike. While a warp computes, its next chunk comes to shared memory, where
// every lane keeps its own columns. Partials [token][row][split] are added by
// hyper_connection_finish.cu.
#include "columns.cuh"
#include "exchange.cuh"
#include "ptx.cuh"

constexpr int WARPS = 8;
constexpr int CHUNK = 32;  // columns of every stream per warp and step
constexpr int TOKENS = 16;
static_assert(TOKENS == TOKEN_TILE);
constexpr int ROW_TILES = (MIXES + 7) / 8;
constexpr int COEFFICIENTS = STREAMS * (STREAMS + 1);
constexpr int ITEMS = STREAMS + POST;  // rows of a token that are read: the streams, then y

// One chunk of one warp: the columns of every lane.
struct Stage {
    Columns<8> item[2][ITEMS][WARP];
};
static_assert(WARPS * 2 * sizeof(Stage) <= SHARED_BYTES);

__device__ __forceinline__ void mma_tf32(float (&sum)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void copy_chunk(Stage& stage, const bf16* y, const bf16* streams,
                                           int chunk, int first, int tokens, int width) {
    const int lane = threadIdx.x % WARP;
    const int group = lane / 4;
    const int column_0 = chunk * CHUNK + lane % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool present = column_0 < width && first + half * 8 + group < tokens;
        const int64 token = present ? first + half * 8 + group : 0;
        const int64 column = present ? column_0 : 0;
#pragma unroll
        for (int j = 0; j < STREAMS; j++)
            copy_or_zero<16>(shared_address(&stage.item[half][j][lane]),
                             streams + (token * STREAMS + j) * width + column, present);
#if POST
        copy_or_zero<16>(shared_address(&stage.item[half][STREAMS][lane]),
                         y + token * width + column, present);
#endif
    }
    cp_async_commit();
}

// x'_k = post_k · y + Σ_j comb_jk · x_j for 8 columns of one token; coefficients: post, then comb,
// of the token.
__device__ __forceinline__ void mix_in(Columns<8> (&stream)[STREAMS], const Columns<8>& y,
                                       const float* coefficients) {
    Columns<8> out[STREAMS];
#pragma unroll
    for (int k = 0; k < STREAMS; k++) {
        float values[8];
#pragma unroll
        for (int c = 0; c < 8; c++) values[c] = coefficients[STREAMS + k] * column(stream[0], c);
#pragma unroll
        for (int j = 1; j < STREAMS; j++) {
            const float factor = coefficients[STREAMS * (j + 1) + k];
#pragma unroll
            for (int c = 0; c < 8; c++) values[c] = fmaf(factor, column(stream[j], c), values[c]);
        }
#pragma unroll
        for (int c = 0; c < 8; c++) values[c] = fmaf(coefficients[k], column(y, c), values[c]);
        out[k] = round_columns(values);
    }
#pragma unroll
    for (int k = 0; k < STREAMS; k++) stream[k] = out[k];
}

extern "C" __global__ void __launch_bounds__(WARPS* WARP, 2)
    hc_mix_many(const bf16* y, const bf16* streams, const float* post, const float* comb,
                const float* fn, bf16* streams_out, float* partials, int owner, int tokens,
                int width) {
    extern __shared__ uint4 dynamic[];
    __shared__ float coefficients[POST ? TOKENS * COEFFICIENTS : 1];
    __shared__ float warp_sums[WARPS][MIXES + 1][TOKENS];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const int group = lane / 4;
    const int quarter = lane % 4;
    const int first = own_token(blockIdx.x * TOKENS, owner);
    Stage* stages = reinterpret_cast<Stage*>(dynamic) + warp * 2;
    if (POST) pdl_launch();
    pdl_wait();
    if (!POST) pdl_launch();
#if POST
    for (int i = threadIdx.x; i < TOKENS * COEFFICIENTS; i += WARPS * WARP) {
        const int64 token = min(first + i / COEFFICIENTS, tokens - 1);
        const int c = i % COEFFICIENTS;
        coefficients[i] =
            c < STREAMS ? post[token * STREAMS + c] : comb[token * STREAMS * STREAMS + c - STREAMS];
    }
    __syncthreads();
#endif
    float total[ROW_TILES][4] = {}, squares[2] = {};
    const int chunks = (width + CHUNK - 1) / CHUNK;
    int chunk = blockIdx.y * WARPS + warp;
    if (chunk < chunks) copy_chunk(stages[0], y, streams, chunk, first, tokens, width);
    for (int turn = 0; chunk < chunks; chunk += SPLITS * WARPS, turn ^= 1) {
        const int column_0 = chunk * CHUNK + quarter * 8;
        const int next = chunk + SPLITS * WARPS;
        if (next < chunks) {
            copy_chunk(stages[turn ^ 1], y, streams, next, first, tokens, width);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        Stage& stage = stages[turn];
        const bool valid = column_0 < width;
#if POST
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int slot = half * 8 + group;
            Columns<8> stream[STREAMS];
#pragma unroll
            for (int j = 0; j < STREAMS; j++) stream[j] = stage.item[half][j][lane];
            // x_MD = post_M[:, None] * y_D + comb_MM.T @ x_MD (POST)
            mix_in(stream, stage.item[half][STREAMS][lane], coefficients + slot * COEFFICIENTS);
            const bool present = valid && first + slot < tokens;
#pragma unroll
            for (int k = 0; k < STREAMS; k++) {
                stage.item[half][k][lane] = stream[k];
                if (present)
                    store_columns(
                        streams_out + ((int64)(first + slot) * STREAMS + k) * width + column_0,
                        stream[k]);
            }
        }
#endif
        float sum[ROW_TILES][4] = {};
#pragma unroll 2
        for (int k = 0; k < STREAMS; k++) {
            Columns<8> stream[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                stream[half] = stage.item[half][k][lane];
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    const float value = column(stream[half], c);
                    // squares = x_MD.square().sum()
                    squares[half] = fmaf(value, value, squares[half]);
                }
            }
#pragma unroll
            for (int n = 0; n < ROW_TILES; n++) {
                const int row = n * 8 + group;
                float weights[8] = {};
                if (valid && row < MIXES)
                    load_constants<8>(fn + ((int64)row * STREAMS + k) * width + column_0, weights);
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    unsigned high[2], low[2];
#pragma unroll
                    for (int b = 0; b < 2; b++) {
                        const float weight = weights[2 * s + b];
                        // mixes = fn @ x_MD.flatten(), with fn = high + low
                        high[b] = __float_as_uint(weight) & 0xffffe000u;
                        low[b] = __float_as_uint(weight - __uint_as_float(high[b])) & 0xffffe000u;
                    }
                    const unsigned a[4] = {__float_as_uint(column(stream[0], 2 * s)),
                                           __float_as_uint(column(stream[1], 2 * s)),
                                           __float_as_uint(column(stream[0], 2 * s + 1)),
                                           __float_as_uint(column(stream[1], 2 * s + 1))};
                    mma_tf32(sum[n], a, high);
                    mma_tf32(sum[n], a, low);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[n][i] += sum[n][i];
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int slot = half * 8 + group;
        float sum = squares[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (quarter == 0) warp_sums[warp][MIXES][slot] = sum;
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const int row = n * 8 + quarter * 2 + b;
                if (row < MIXES) warp_sums[warp][row][slot] = total[n][2 * half + b];
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < (MIXES + 1) * TOKENS; i += WARPS * WARP) {
        const int row = i / TOKENS, slot = i % TOKENS;
        if (first + slot >= tokens) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += warp_sums[w][row][slot];
        // partials[token, :, split] = torch.cat([mixes, squares])
        partials[((int64)(first + slot) * (MIXES + 1) + row) * SPLITS + blockIdx.y] = sum;
    }
}
