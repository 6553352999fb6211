// Hyper-connection mixes of few tokens: hc_post arithmetic if asked for, then fn · x and Σ x² of
// the (rounded) streams.
//
// Defines: STREAMS (M), MIXES (rows of fn), POST (1: mix y into the streams first, 0: read them),
// COUNT columns per access (4 or 1), PER_LANE accesses per lane, TOKENS per block, RANKS (above 1:
// y comes as words of all ranks, exchange.cuh).
//
// A block owns PER_LANE · 32 / M neighbouring groups of COUNT columns of all M streams; every warp
// visits all of them for its own rows of fn, whose values wait in registers before the dependency
// on the kernel before is met. So no step crosses warps: one shuffle reduction per row ends in
// partials[token][row][block]. hyper_connection_finish.cu adds them.
#include "columns.cuh"
#include "exchange.cuh"

constexpr int WARPS = 8;
constexpr int ROWS = (MIXES + WARPS - 1) / WARPS;
constexpr int GROUPS = PER_LANE * WARP / STREAMS;

constexpr int BLOCK_COLUMNS = GROUPS * COUNT;

// The warps all visit the block's columns, so that each of them would look for the words of all
// ranks. Of many ranks these are too many: every thread looks for others, and all find them in
// shared memory. A rank of 8 of Pro takes 3.5 % less a token, two ranks of Flash would take 0.9 %
// more.
#if RANKS > 2
static_assert(!POST || TOKENS <= 2, "every token has words of its own in shared memory");
__shared__ __align__(16) float found[2][RANKS][BLOCK_COLUMNS];

// What all ranks have of y for the block's columns, of its `own`-th token. For the whole block.
__device__ __forceinline__ void find_words(const Inbox& inbox, int own, int64 token, int width) {
    constexpr int PAIR = COUNT == 1 ? 1 : 2;
    constexpr int PAIRS = BLOCK_COLUMNS / PAIR;
    const int first = blockIdx.x * BLOCK_COLUMNS;
#pragma unroll 1
    for (int i = threadIdx.x; i < RANKS * PAIRS; i += WARPS * WARP) {
        const int rank = i / PAIRS, column = i % PAIRS * PAIR;
        if (first + column >= width) continue;
        float values[PAIR];
        inbox.find(token * width + first + column, rank, values);
#pragma unroll
        for (int j = 0; j < PAIR; j++) found[own][rank][column + j] = values[j];
    }
    __syncthreads();
}

// In the order of the ranks.
__device__ __forceinline__ void sum_found(int own, int column, float (&sums)[COUNT]) {
#pragma unroll
    for (int c = 0; c < COUNT; c++) {
        sums[c] = found[own][0][column + c];
#pragma unroll
        for (int rank = 1; rank < RANKS; rank++) sums[c] += found[own][rank][column + c];
    }
}
#endif

struct Inputs {
    Columns<COUNT> stream[PER_LANE][STREAMS], y[PER_LANE];
    float post[PER_LANE], comb[PER_LANE][STREAMS];
};

struct Place {
    int stream;    // k: the stream this lane computes
    int64 column;  // first of its COUNT columns
    bool valid;
};

__device__ __forceinline__ Place place(int access, int lane, int width) {
    const unsigned position = access * WARP + lane;
    const unsigned group = position % GROUPS;
    const int64 column = (int64)(blockIdx.x * GROUPS + group) * COUNT;
    const bool valid = position < GROUPS * STREAMS && column < width;
    return {valid ? int(position / GROUPS) : 0, valid ? column : 0, valid};
}

__device__ __forceinline__ void load_inputs(Inputs& in, const Place (&at)[PER_LANE], const bf16* y,
                                            const Inbox& inbox, const bf16* streams,
                                            const float* post, const float* comb, int own,
                                            int64 token, int width) {
#if POST && RANKS > 2
    find_words(inbox, own, token, width);
#endif
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const bf16* row = streams + token * STREAMS * width + at[i].column;
#if POST
#pragma unroll
        for (int j = 0; j < STREAMS; j++)
            in.stream[i][j] = load_columns<COUNT>(row + (int64)j * width);
#if RANKS > 1
        float sums[COUNT];
#if RANKS > 2
        sum_found(own, at[i].valid ? at[i].column - blockIdx.x * BLOCK_COLUMNS : 0, sums);
#else
        inbox.sum(token * width + at[i].column, sums);
#endif
        in.y[i] = round_columns(sums);
#else
        in.y[i] = load_columns<COUNT>(y + token * width + at[i].column);
#endif
        in.post[i] = post[token * STREAMS + at[i].stream];
#pragma unroll
        for (int j = 0; j < STREAMS; j++)
            in.comb[i][j] = comb[(token * STREAMS + j) * STREAMS + at[i].stream];
#else
        in.stream[i][0] = load_columns<COUNT>(row + (int64)at[i].stream * width);
#endif
    }
}

// x'_k = post_k · y + Σ_j comb_jk · x_j, rounded: the value that the next sublayer and the mixes
// see.
__device__ __forceinline__ Columns<COUNT> new_stream(const Inputs& in, int i) {
#if POST
    float values[COUNT];
#pragma unroll
    for (int c = 0; c < COUNT; c++) {
        float mixed = in.comb[i][0] * column(in.stream[i][0], c);
#pragma unroll
        for (int j = 1; j < STREAMS; j++)
            mixed = fmaf(in.comb[i][j], column(in.stream[i][j], c), mixed);
        values[c] = fmaf(in.post[i], column(in.y[i], c), mixed);
    }
    return round_columns(values);
#else
    return in.stream[i][0];
#endif
}

// 1: no register is saved for a second block, which spills for 8 ranks on Blackwell.
constexpr int LEAST_BLOCKS = RANKS > 2 ? 1 : 0;

extern "C" __global__ void __launch_bounds__(WARPS* WARP, LEAST_BLOCKS)
    hc_mix(const bf16* y, const bf16* streams, const float* post, const float* comb,
           const float* fn, bf16* streams_out, float* partials, const int64* peers, int64 slot,
           int64 rank_words, int exchange, int tokens, int width) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Place at[PER_LANE];
    float weights[PER_LANE][ROWS][COUNT];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        at[i] = place(i, lane, width);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int row = warp * ROWS + r;
            if (at[i].valid && row < MIXES) {
                fetch_constants<COUNT>(
                    fn + ((int64)row * STREAMS + at[i].stream) * width + at[i].column,
                    weights[i][r]);
            } else {
#pragma unroll
                for (int c = 0; c < COUNT; c++) weights[i][r][c] = 0.0f;
            }
        }
    }
    pdl_launch();
    pdl_wait();
    const int first = blockIdx.y * TOKENS, last = min(first + TOKENS, tokens);
    const Inbox inbox(peers, slot, rank_words, exchange);
    Inputs next;
    load_inputs(next, at, y, inbox, streams, post, comb, 0, first, width);
    for (int token = first; token < last; token++) {
        const Inputs in = next;
        if (token + 1 < last)
            load_inputs(next, at, y, inbox, streams, post, comb, token + 1 - first, token + 1,
                        width);
        float sums[ROWS] = {}, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            // x_MD = post_M[:, None] * y_D + comb_MM.T @ x_MD (POST)
            const Columns<COUNT> x = new_stream(in, i);
#if POST
            if (at[i].valid && warp == i % WARPS)
                store_columns(
                    streams_out + ((int64)token * STREAMS + at[i].stream) * width + at[i].column,
                    x);
#endif
            // The weights of a lane without a place are 0, its values those of place 0.
#pragma unroll
            for (int c = 0; c < COUNT; c++) {
                const float value = column(x, c);
                // mixes = fn @ x_MD.flatten(); squares = x_MD.square().sum()
                if (at[i].valid) squares = fmaf(value, value, squares);
#pragma unroll
                for (int r = 0; r < ROWS; r++) sums[r] = fmaf(weights[i][r][c], value, sums[r]);
            }
        }
        // partials[token, :, block] = torch.cat([mixes, squares])
        float* out = partials + (int64)token * (MIXES + 1) * gridDim.x + blockIdx.x;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float sum = warp_sum(sums[r]);
            if (lane == 0 && warp * ROWS + r < MIXES) out[(warp * ROWS + r) * gridDim.x] = sum;
        }
        if (warp == WARPS - 1) {
            const float sum = warp_sum(squares);
            if (lane == 0) out[MIXES * gridDim.x] = sum;
        }
    }
}
