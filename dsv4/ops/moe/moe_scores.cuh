// Scores of all experts: every block multiplies some rows of the gate with all tokens and sends the
// scores to all blocks.
//
// Defines: those of moe_decode.cu; GATE_ROUNDS (pairs of gate rows per block).
#pragma once
#include "moe_shape.cuh"
#include "numbered_word.cuh"
#include "ptx.cuh"
#include "router.cuh"
#include "weight_tile.cuh"

constexpr int GATE_ROWS = 2 * GATE_ROUNDS, GATE_PLACES = power_of_two(GATE_ROWS);

// Rows g and g + 8 of a row tile lie side by side in the packed layout: 8 bytes hold two columns of
// both. A block has the pairs of rows blockIdx.x, blockIdx.x + gridDim.x, ...; a thread their
// columns 8 v to 8 v + 7, where v is threadIdx.x, threadIdx.x + THREADS, ...
struct GateRows {
    uint2 columns[GATE_ROUNDS][VECTORS][4];

    // Constants only: runs before pdl_wait.
    __device__ __forceinline__ void request(const char* gate, int E, int X) {
        const int chunks = (E + 63) / 64 * 4, pairs = (X + 15) / 16 * 8;
#pragma unroll
        for (int round = 0; round < GATE_ROUNDS; ++round) {
            const int pair = blockIdx.x + round * BLOCKS;
            const char* rows = gate + size_t(pair / 8) * chunks * LOAD_BYTES + pair % 8 * 64;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const int vector = threadIdx.x + i * THREADS;
                const char* from = rows + size_t(vector / 2) * LOAD_BYTES + vector % 2 * 8;
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    columns[round][i][j] =
                        pair < pairs && vector < 2 * chunks
                            ? __ldg(reinterpret_cast<const uint2*>(from + j * 16))
                            : make_uint2(0, 0);
            }
        }
    }

    // What this thread's columns of a token add to the logits of row `row` of its block.
    __device__ __forceinline__ float product(int row, const uint4 (&x)[VECTORS]) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const unsigned word[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint2 both = columns[row / 2][i][j];
                const unsigned w = row % 2 ? both.y : both.x;
                sum = fmaf(bf16_high(w), bf16_high(word[j]),
                           fmaf(bf16_low(w), bf16_low(word[j]), sum));
            }
        }
        return sum;
    }
};

// Log scores on their way between blocks.
struct ScoreExchange {
    NumberedWord* words;  // [MAX_TOKENS, PER_LANE * WARP], zeros before the first launch
    unsigned launch;

    // parts: the logits by warp, float [T, GATE_ROWS, WARPS] in shared memory.
    __device__ __forceinline__ void send(const float* parts, int T, int X) const {
        for (int i = threadIdx.x; i < T * GATE_ROWS; i += THREADS) {
            const int token = i / GATE_ROWS;
            const int row = i % GATE_ROWS;
            const int pair = blockIdx.x + row / 2 * BLOCKS;
            const int expert = pair / 8 * 16 + pair % 8 + row % 2 * 8;
            if (expert >= X) continue;
            float logit = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) logit += parts[i * WARPS + warp];
            store_word(words + token * (PER_LANE * WARP) + expert,
                       numbered(launch, log_score(logit)));
        }
    }

    // All scores of a token, for one warp.
    __device__ __forceinline__ void receive(float (&score)[PER_LANE], int token, int X) const {
        const Deadline deadline;
        bool complete;
        do {
            complete = true;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                const int expert = i * WARP + threadIdx.x % WARP;
                NumberedWord word = numbered(launch, 0.0f);
                if (expert < X) word = load_word(words + token * (PER_LANE * WARP) + expert);
                complete &= unsigned(word >> 32) == launch;
                score[i] = __uint_as_float(unsigned(word));
            }
            deadline.check();
        } while (!__all_sync(~0u, complete));
    }
};
