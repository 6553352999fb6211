// Hyper-connection mixes of few tokens: hc_post arithmetic if asked for, then fn · x and Σ x² of
// the (rounded) streams.
//
// Defines: STREAMS (M), MIXES (rows of fn), POST (1: mix y into the streams first, 0: read them),
// TOKENS (1 to 8: the most of a block), COUNT columns per access (4 or 1), PER_LANE accesses per
// lane, SETTLED (1: all but y, and the number of the step, were complete when the kernel started),
// LEFT (1: comb is not balanced yet), RANKS (above 1: y comes as words of all ranks, exchange.cuh).
//
// A block owns PER_LANE · 32 / M neighbouring groups of COUNT columns of all M streams, of up to
// TOKENS tokens. First its threads share out the tokens' columns and put their streams into shared
// memory: whatever comes from other kernels is asked for at once, by one thread each.
// Then every warp visits all of them for its own rows of fn, whose values wait in registers before
// the dependency on the kernel before is met. So no step crosses warps: one reduction by shuffles
// ends in partials[token][row][block]. hyper_connection_finish.cu adds them.
#include "columns.cuh"
#include "exchange.cuh"
#include "sinkhorn.cuh"

#ifndef SETTLED
#define SETTLED 0
#endif
#ifndef LEFT
#define LEFT 0
#endif

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int ROWS = (MIXES + WARPS - 1) / WARPS;
// Sums of a token that a warp holds: those of its rows and, behind them, of the squares.
constexpr int SQUARES = ROWS;
constexpr int PLACES = power_of_two(ROWS + 1);
// Tokens whose sums are added up over the warp at a time.
constexpr int ROOM = power_of_two(TOKENS);
constexpr int AT_ONCE = PLACES * ROOM <= WARP ? ROOM : WARP / PLACES;
constexpr int GROUPS = PER_LANE * WARP / STREAMS;
constexpr int BLOCK_COLUMNS = GROUPS * COUNT;
// Columns that a thread makes streams of: words of ranks are read in pairs.
constexpr int PAIR = COUNT == 1 ? 1 : 2;
constexpr int PAIRS = BLOCK_COLUMNS / PAIR;
// Whether a thread may make streams of a second pair.
constexpr bool SECOND = TOKENS * PAIRS > THREADS;
// Whether post and comb of a token are whole vectors.
constexpr bool VECTORS = COUNT == 4 && STREAMS % 4 == 0;

// The block's columns of the streams that the mixes see.
using Streams = bf16[STREAMS][BLOCK_COLUMNS];

// What a block reads of its tokens. `first`: the first one's place in the inbox.
struct Tokens {
    const bf16 *y, *streams;
    const float *post, *comb;
    int64 first;
    int width, iterations;
    float hc_eps;
};

// The streams of a token's columns `column` to column + PAIR - 1, and how they are mixed. A comb
// that was left every thread makes for itself, which takes no longer than if one did.
struct Older {
    Columns<PAIR> stream[STREAMS];
    float post[STREAMS], comb[STREAMS][STREAMS];

    __device__ __forceinline__ void request(const Tokens& in, unsigned token, unsigned column) {
#pragma unroll
        for (int j = 0; j < STREAMS; j++)
            stream[j] =
                request_columns<PAIR>(in.streams + (token * STREAMS + j) * in.width + column);
#if POST
        request_values<VECTORS>(in.post + token * STREAMS, post);
        request_values<VECTORS>(in.comb + token * STREAMS * STREAMS,
                                reinterpret_cast<float(&)[STREAMS * STREAMS]>(comb));
        if (LEFT) sinkhorn(comb, in.hc_eps, in.iterations);
#endif
    }
};

// Columns of the sublayer's output. `place`: where they are in it.
__device__ __forceinline__ Columns<PAIR> output_columns(const Tokens& in, const Inbox& inbox,
                                                        unsigned place) {
#if !POST
    return {};
#elif RANKS > 1
    float sums[PAIR];
    inbox.sum(in.first + place, sums);
    return round_columns(sums);
#else
    return request_columns<PAIR>(in.y + place);
#endif
}

// x'_k = post_k · y + Σ_j comb_jk · x_j, rounded: the value that the next sublayer and the mixes
// see.
__device__ __forceinline__ void make_streams(Columns<PAIR> (&made)[STREAMS], const Older& older,
                                             const Columns<PAIR>& y) {
#if POST
#pragma unroll
    for (int k = 0; k < STREAMS; k++) {
        float values[PAIR];
#pragma unroll
        for (int c = 0; c < PAIR; c++) {
            float mixed = older.comb[0][k] * column(older.stream[0], c);
#pragma unroll
            for (int j = 1; j < STREAMS; j++)
                mixed = fmaf(older.comb[j][k], column(older.stream[j], c), mixed);
            values[c] = fmaf(older.post[k], column(y, c), mixed);
        }
        made[k] = round_columns(values);
    }
#else
#pragma unroll
    for (int k = 0; k < STREAMS; k++) made[k] = older.stream[k];
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hc_mix(const bf16* y, const bf16* streams, const float* post, const float* comb,
           const float* fn, bf16* streams_out, float* partials, const int64* peers, int64 slot,
           int64 rank_words, int exchange, int tokens, int width, float hc_eps, int iterations) {
    __shared__ __align__(16) Streams mixed[TOKENS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned block_column = blockIdx.x * BLOCK_COLUMNS;
    // Of a lane's accesses: which stream it computes with, and the first of its COUNT columns.
    int stream[PER_LANE], column_0[PER_LANE];
    float weights[PER_LANE][ROWS][COUNT];
    bool valid[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const unsigned position = i * WARP + lane;
        stream[i] = position / GROUPS, column_0[i] = position % GROUPS * COUNT;
        valid[i] = position < GROUPS * STREAMS && block_column + column_0[i] < width;
        if (!valid[i]) stream[i] = column_0[i] = 0;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int row = warp * ROWS + r;
            if (valid[i] && row < MIXES) {
                fetch_constants<COUNT>(
                    fn + ((int64)row * STREAMS + stream[i]) * width + block_column + column_0[i],
                    weights[i][r]);
            } else {
#pragma unroll
                for (int c = 0; c < COUNT; c++) weights[i][r][c] = 0.0f;
            }
        }
    }
    const InboxAddress address(peers);
    const int64 first = (int64)blockIdx.y * TOKENS;
    // A block of fewer than the most tokens is the only one of its columns.
    const int count =
        TOKENS < MAX_DECODE_TOKENS ? TOKENS : min(MAX_DECODE_TOKENS, tokens - int(first));
    const Tokens sublayer = {y + first * width,
                             streams + first * STREAMS * width,
                             post + first * STREAMS,
                             comb + first * STREAMS * STREAMS,
                             first * width,
                             width,
                             iterations,
                             hc_eps};
    streams_out += first * STREAMS * width + block_column;
    partials += first * (MIXES + 1) * gridDim.x + blockIdx.x;
    // Of the first item of this thread, and later of the others.
    Older older;
    Columns<PAIR> output = {};
    const auto is_there = [&](unsigned item) {
        return item < count * PAIRS && block_column + item % unsigned(PAIRS) * PAIR < width;
    };
    const auto request_older = [&](unsigned item) {
        const unsigned token = item / unsigned(PAIRS), column = item % unsigned(PAIRS) * PAIR;
        if (is_there(item)) older.request(sublayer, token, block_column + column);
    };
    const auto find_output = [&](const Inbox& inbox, unsigned item) {
        const unsigned token = item / unsigned(PAIRS), column = item % unsigned(PAIRS) * PAIR;
        if (is_there(item))
            output = output_columns(sublayer, inbox, token * width + block_column + column);
    };
    if (POST) pdl_launch();
    if (SETTLED) request_older(threadIdx.x);
    // Words say themselves that they are there.
    constexpr bool EARLY = POST && SETTLED && RANKS > 1;
    if (!EARLY) pdl_wait();
    const Inbox inbox(address, slot, rank_words, exchange);
    if (EARLY) {
        find_output(inbox, threadIdx.x);
        pdl_wait();
    }
    // The first kernel behind the opening of a step settles what that writes.
    if (!POST) pdl_launch();
    // x_MD = post_M[:, None] * y_D + comb_MM.T @ x_MD (POST)
#pragma unroll 1
    for (unsigned item = threadIdx.x; item < count * PAIRS; item += THREADS) {
        const unsigned token = item / unsigned(PAIRS), column = item % unsigned(PAIRS) * PAIR;
        Columns<PAIR> made[STREAMS] = {};
        if (!SETTLED || (SECOND && item >= THREADS)) request_older(item);
        if (!EARLY || (SECOND && item >= THREADS)) find_output(inbox, item);
        if (is_there(item)) {
            make_streams(made, older, output);
#if POST
#pragma unroll
            for (int k = 0; k < STREAMS; k++)
                store_columns(streams_out + (token * STREAMS + k) * width + column, made[k]);
#endif
        }
#pragma unroll
        for (int k = 0; k < STREAMS; k++) store_columns(&mixed[token][k][column], made[k]);
    }
    __syncthreads();
#pragma unroll 1
    for (int batch = 0; batch < count; batch += AT_ONCE) {
        float sums[AT_ONCE][PLACES] = {};
#pragma unroll
        for (int t = 0; t < min(AT_ONCE, TOKENS); t++) {
            // Of tokens that are not there the sums are those of the last one.
            const int token = min(batch + t, count - 1);
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                Columns<COUNT> x = {};
                if (valid[i]) x = load_columns<COUNT>(&mixed[token][stream[i]][column_0[i]]);
#pragma unroll
                for (int c = 0; c < COUNT; c++) {
                    const float value = column(x, c);
                    // mixes = fn @ x_MD.flatten(); squares = x_MD.square().sum()
                    sums[t][SQUARES] = fmaf(value, value, sums[t][SQUARES]);
#pragma unroll
                    for (int r = 0; r < ROWS; r++)
                        sums[t][r] = fmaf(weights[i][r][c], value, sums[t][r]);
                }
            }
        }
        // partials[token, :, block] = torch.cat([mixes, squares])
        const float sum = warp_sums(reinterpret_cast<float(&)[AT_ONCE * PLACES]>(sums));
        const int found = lane / (WARP / (AT_ONCE * PLACES)), token = batch + found / PLACES;
        const int place = found % PLACES;
        const int row = place == SQUARES ? MIXES : warp * ROWS + place;
        const bool stored = place == SQUARES ? warp == WARPS - 1 : place < ROWS && row < MIXES;
        if (stored && token < count && lane % (WARP / (AT_ONCE * PLACES)) == 0)
            partials[(token * (MIXES + 1) + row) * gridDim.x] = sum;
    }
}
