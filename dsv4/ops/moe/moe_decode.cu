// Router and mixture of experts for 1 to 8 tokens in one launch that streams every weight once.
//
//   routing  scores of all experts, shared out over the blocks and exchanged (moe_routes.cuh),
//            while the first weights of phase 1 are on their way
//   phase 1  h = round(weight * silu(min(w1 x, limit)) * clamp(w3 x, limit)) for the shared expert
//            and every distinct routed expert of the step
//   phase 2  y = sum over those experts of w2 h, one list of K per 32 output rows
//
// One block per multiprocessor. Blocks never meet: scores, h and sums on their way between blocks
// are words that say themselves that they have arrived (moe_routes.cuh, moe_hidden.cuh,
// moe_down.cuh). A work item is a part of K of two row tiles of 16 (gate and up rows, or two tiles
// of the output). Its stages are dealt to the warps of a block; each warp streams its own stages
// through its own ring in shared memory, so that no warp waits for another one's loads. The warps'
// sums meet in shared memory and one warp finishes the item.
//
// A token gets the same bits in a step of any length, beside any other tokens: every order of
// summation goes with the shapes, the number of warps and the token's own experts. In phase 1 part
// i of an item's sum is of the stages i, i + WARPS, ..., whichever warp has them; in phase 2 see
// moe_down.cuh.
//
// Defines: the shape, so that what goes with it alone is computed when the kernel is compiled:
// WIDTH (E), INNER (F), EXPERTS (X), EXPERTS_PER_TOKEN (P), BLOCKS (of the launch). ROUTED, SHARED
// (weight formats), TOKENS (1 to 8, as many as the launch has), TAILS (1: E or F is no multiple of
// a stage's columns), WARPS, STAGES (ring depth), LOADS_AT_ONCE (loads of a stage that are decoded
// side by side: 2 or 4), VECTORS (eights of activations of a token per thread), TOKENS_AT_ONCE
// (whose activations a thread holds), RANKS (above 1: y goes to the ranks as words, exchange.cuh),
// and those of moe_routes.cuh.
#include "exchange.cuh"
#include "moe_products.cuh"

// Lanes of a warp that arrive at the barriers of its sums. One is enough behind __syncwarp and up
// to 4 % faster than all; but racecheck does not see what the other lanes hand over with it, so it
// looks at a build with 32.
#ifndef ARRIVALS
#define ARRIVALS 1
#endif

// Row tiles of w2 (2.3 KB) that a warp has in flight while it waits for its first hidden rows; all
// of the ring are 2 * STAGES. Every trip of a block through L2, also to look for h, queues behind
// what the block has in flight: 350 clocks behind nothing, 525 behind 32 KB, 1,240 behind 64 KB. 24
// to 32 KB are enough to keep the memory busy.
constexpr int WAITING_TILES = 1;

// Whether a stage's hidden rows are on their way to registers during the products of the stage
// before it. With a ring of one stage, whose weights are requested behind these, nothing is gained
// by it.
constexpr bool HIDDEN_AHEAD = STAGES > 1;

// Items whose warp sums may be in shared memory at a time; the activations of eight tokens leave
// room for two.
constexpr int BUFFERS = TOKENS > 4 ? 2 : 4;
constexpr int PARTIAL = 2 * TOKENS * 16;
constexpr bool ANY_BF16 = ROUTED == BF16 || SHARED == BF16;
constexpr bool ANY_F16 = ROUTED != BF16 || SHARED != BF16;

#include "moe_hidden.cuh"
#include "moe_routes.cuh"

// Exact n / divisor for n · divisor < 2^32.
struct Divisor {
    unsigned reciprocal;

    __device__ __forceinline__ explicit Divisor(int divisor) {
        // 0 stands for 2^32.
        reciprocal = divisor > 1 ? 0xFFFFFFFFu / divisor + 1 : 0;
    }

    __device__ __forceinline__ int divide(int n) const {
        return reciprocal ? __umulhi(n, reciprocal) : n;
    }
};

#include "moe_down.cuh"

static_assert(WARPS >= TOKENS, "a warp per token chooses its experts");
static_assert(GATE_ROWS <= BUFFERS * PARTIAL / TOKENS,
              "the warps' parts of the logits lie where those of an item will");

// ---- weights ------------------------------------------------------------------------------------

// Where the stages of a packed matrix [rows, columns] (or a stack of them) lie.
template <int FORMAT>
struct Layout {
    int loads;
    unsigned tile_bytes, scale_tile_bytes, matrix_bytes, scale_matrix_bytes;

    __device__ __forceinline__ Layout(int rows, int columns) {
        const int tiles = (rows + 63) / 64 * 4;
        loads = (columns + 63) / 64 * (64 / Stage<FORMAT>::CHUNK);
        tile_bytes = loads * LOAD_BYTES;
        matrix_bytes = tiles * tile_bytes;
        scale_tile_bytes =
            FORMAT == FP8 ? (columns + 127) / 128 * 4 : loads * Stage<FORMAT>::CHUNK_SCALE;
        scale_matrix_bytes = (FORMAT == FP8 ? (rows + 127) / 128 : tiles) * scale_tile_bytes;
    }

    __device__ __forceinline__ int stages() const {
        return (loads + STAGE_LOADS - 1) / STAGE_LOADS;
    }

    __device__ __forceinline__ void fetch(unsigned slot, const char* data, const char* scale,
                                          int matrix, int tile, int stage, int lane) const {
        data += size_t(unsigned(matrix)) * matrix_bytes + (tile * tile_bytes + stage * STAGE_DATA);
        if (FORMAT == FP8)
            scale += size_t(unsigned(matrix)) * scale_matrix_bytes +
                     ((tile >> 3) * scale_tile_bytes + stage * 4);
        else if (FORMAT != BF16)
            scale += size_t(unsigned(matrix)) * scale_matrix_bytes +
                     (tile * scale_tile_bytes + stage * (STAGE_LOADS * Stage<FORMAT>::CHUNK_SCALE));
        stage_fetch<FORMAT, TAILS>(slot, data, scale, lane, loads - stage * STAGE_LOADS);
    }
};

// ---- sums over the warps of a block -------------------------------------------------------------

struct Partials {
    float* data;
    unsigned full, empty;

    __device__ __forceinline__ static int buffer(int item) { return item % BUFFERS; }
    __device__ __forceinline__ static unsigned parity(int item) { return item / BUFFERS & 1; }
    __device__ __forceinline__ static bool mine(int item, int warp) { return item % WARPS == warp; }

    // place: where the sum of this warp stands in the order of summation.
    __device__ __forceinline__ void put(int item, const Sums& sums, int place, int lane) const {
        if (item >= BUFFERS) barrier_wait(empty + 8 * buffer(item), parity(item) ^ 1);
        store(buffer(item) * WARPS + place, sums, 1.0f, 1.0f, lane);
        arrive(item, lane);
    }

    // The sums of a lane's first token times `low`, of its second one times `high`.
    __device__ __forceinline__ void store(int place, const Sums& sums, float low, float high,
                                          int lane) const {
        float* to = data + place * PARTIAL + (lane >> 2);
        const int token = lane % 4 / TOKEN_LANES * LANE_TOKENS;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int row = 0; row < 2; ++row)
#pragma unroll
                for (int t = 0; t < LANE_TOKENS; ++t) {
                    const float sum = sums.total(tile, row, t) * (t ? high : low);
                    if (lane % TOKEN_LANES == 0 && token + t < TOKENS)
                        to[(tile * TOKENS + token + t) * 16 + row * 8] = sum;
                }
    }

    // This warp has stored its sums of an item.
    __device__ __forceinline__ void arrive(int item, int lane) const {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(full + 8 * buffer(item));
    }

    __device__ __forceinline__ void begin_get(int item) const {
        barrier_wait(full + 8 * buffer(item), parity(item));
    }

    // Lane = row of the two tiles (0..31); sum over the warps for one token.
    __device__ __forceinline__ float get(int item, int token, int lane) const {
        const float* from = row(buffer(item) * WARPS, lane) + token * 16;
        float sum = 0.0f;
#pragma unroll
        for (int place = 0; place < WARPS; ++place) sum += from[place * PARTIAL];
        return sum;
    }

    // The first token's value of a lane's row at a place.
    __device__ __forceinline__ const float* row(int place, int lane) const {
        return data + place * PARTIAL + (lane >> 4) * TOKENS * 16 + (lane & 15);
    }

    __device__ __forceinline__ void end_get(int item, int lane) const {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(empty + 8 * buffer(item));
    }
};

// ---- gate and up --------------------------------------------------------------------------------

// The items of a block: first its share of the shared expert's tiles, then routed tiles. The routed
// ones are dealt in rounds, so that all blocks get nearly equal bytes: blocks that have one shared
// tile more ("late") sit out the first `skipped` + 1 rounds, about as long as their extra tile
// takes.
struct GateUpItems {
    int number, tile, slot, stage;
    int tiles, shared_tiles, shared_stages, routed_stages;
    int routed_items, late, first, skipped;
    Divisor by_tiles;

    __device__ __forceinline__ GateUpItems(int row_tiles, int shared_n, int routed_n,
                                           int shared_bytes, int routed_bytes, int warp)
        : by_tiles(row_tiles) {
        const int blocks = BLOCKS, block = blockIdx.x;
        tiles = row_tiles, shared_stages = shared_n, routed_stages = routed_n;
        late = tiles % blocks;
        shared_tiles = tiles / blocks + (block < late);
        skipped = shared_bytes / routed_bytes;
        first = block < late ? (skipped + 1) * (blocks - late) + block : block - late;
        if (block < late) skipped = -1;
        routed_items = 0, number = 0, stage = warp;
        place();
    }

    // Sets tile and slot (-1: the shared expert) of the current item.
    __device__ __forceinline__ void place() {
        const int round = number - shared_tiles;
        slot = -1;
        tile = blockIdx.x + number * BLOCKS;
        if (round >= 0) {
            // In early rounds the late blocks take nothing.
            const int item =
                first + round * BLOCKS - (skipped < 0 ? 0 : min(round, skipped) * late);
            slot = item < routed_items ? by_tiles.divide(item) : MAX_ENTRIES;
            tile = item - slot * tiles;
        }
    }

    __device__ __forceinline__ bool active() const { return slot < MAX_ENTRIES; }
    __device__ __forceinline__ int stages() const {
        return slot < 0 ? shared_stages : routed_stages;
    }

    __device__ __forceinline__ void next_item() {
        ++number;
        place();
    }

    // Moves on until the item has a stage for this warp.
    __device__ __forceinline__ void settle() {
#pragma unroll 1
        while (active() && stage >= stages()) {
            stage -= stages();
            next_item();
        }
    }

    // Once the number of routed tiles is known; before, the list ends with the shared ones.
    __device__ __forceinline__ void start_routed(int items) {
        routed_items = items;
        place();
    }
};

__device__ __forceinline__ unsigned pack_f16(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// Eight consecutive bfloat16 of a row, zeros beyond E.
__device__ __forceinline__ uint4 load_row8(const bf16* row, int k, int E) {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (!TAILS || E % 8 == 0) {
        if (k < E) raw = __ldcg(reinterpret_cast<const uint4*>(row + k));
        return raw;
    }
    unsigned word[4] = {0, 0, 0, 0};
    for (int i = 0; i < 8; ++i)
        if (k + i < E)
            word[i / 2] |= unsigned(__ldcg(reinterpret_cast<const unsigned short*>(row) + k + i))
                           << (16 * (i & 1));
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ float largest8(const uint4& raw) {
    float value = 0.0f;
    const unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        value = fmaxf(value, fmaxf(fabsf(bf16_low(word[i])), fabsf(bf16_high(word[i]))));
    return value;
}

// Eight consecutive k (from a multiple of 8) of a token, where Activations look for them.
__device__ __forceinline__ void store_activations(char* to, const uint4& raw, int token, int k,
                                                  int tokens, float factor, bool as_f16) {
    char* at = to + ((k >> 5) * tokens + token) * 64;
    unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
    if (as_f16) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair)
            word[pair] = pack_f16(bf16_low(word[pair]) * factor, bf16_high(word[pair]) * factor);
    }
    const int turn = SPREADS ? 0 : store_turn<TOKENS>(threadIdx.x % WARP);
    rotate(word, turn);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair)
        *reinterpret_cast<unsigned*>(at + word_at((k >> 1 & 12) + (pair + turn) % 4)) = word[pair];
}

// Columns of the staged activations: whole stages, zeros behind the end.
__device__ __forceinline__ int stage_padded(int columns) {
    return TAILS ? (columns + STAGE_COLUMNS - 1) / STAGE_COLUMNS * STAGE_COLUMNS : columns;
}

// Activations of the step, in shared memory once per 16-bit type that a weight format needs:
// measure, a barrier, stage, a barrier. Up to TOKENS_AT_ONCE stay in registers between the two;
// more are read again.
struct Inputs {
    char *f16, *bf16_rows;
    // [token][warp] largest magnitudes.
    float* largest;
    uint4 rows[TOKENS_AT_ONCE][VECTORS];

    __device__ __forceinline__ void load(const bf16* x_TE, int first, int T, int E) {
#pragma unroll
        for (int t = 0; t < TOKENS_AT_ONCE; ++t)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                rows[t][i] = load_row8(x_TE + size_t(min(first + t, T - 1)) * E,
                                       (threadIdx.x + i * THREADS) * 8, E);
    }

    // Also multiplies with the block's rows of the gate; parts: float [T, GATE_ROWS, WARPS] in
    // shared memory.
    __device__ __forceinline__ void measure(const bf16* x_TE, int T, int E, const GateRows& gate,
                                            float* parts) {
        const int warp = warp_index(), lane = threadIdx.x % WARP;
#pragma unroll 1
        for (int first = 0; first < (TOKENS > TOKENS_AT_ONCE ? T : 1); first += TOKENS_AT_ONCE) {
            load(x_TE, first, T, E);
#pragma unroll
            for (int t = 0; t < TOKENS_AT_ONCE; ++t) {
                float value = 0.0f;
#pragma unroll
                for (int i = 0; i < VECTORS; ++i) value = fmaxf(value, largest8(rows[t][i]));
                value = warp_max_magnitude(value);
                const int token = first + t;
                if (lane == 0 && token < T) largest[token * WARPS + warp] = value;
                float products[GATE_PLACES] = {};
#pragma unroll
                for (int row = 0; row < GATE_ROWS; ++row)
                    products[row] = gate.product(row, rows[t]);
                const float sum = warp_sums(products);
                const int row = lane / (WARP / GATE_PLACES);
                if (lane % (WARP / GATE_PLACES) == 0 && row < GATE_ROWS && token < T)
                    parts[(token * GATE_ROWS + row) * WARPS + warp] = sum;
            }
        }
    }

    __device__ __forceinline__ void stage(const bf16* x_TE, int T, int E, float* unscale) {
#pragma unroll 1
        for (int first = 0; first < (TOKENS > TOKENS_AT_ONCE ? T : 1); first += TOKENS_AT_ONCE) {
            if (TOKENS > TOKENS_AT_ONCE) load(x_TE, first, T, E);
#pragma unroll
            for (int t = 0; t < TOKENS_AT_ONCE; ++t) {
                const int token = first + t;
                if (token >= T) break;
                const int lane = threadIdx.x % WARP;
                const float value =
                    warp_max_magnitude(lane < WARPS ? largest[token * WARPS + lane] : 0.0f);
                const float factor = f16_factor(value);
                if (threadIdx.x == 0) unscale[token] = inverse_power(factor);
#pragma unroll
                for (int i = 0; i < VECTORS; ++i) {
                    const int k = (threadIdx.x + i * THREADS) * 8;
                    if (k < stage_padded(E)) store(rows[t][i], token, k, T, factor);
                }
            }
        }
    }

    __device__ __forceinline__ void store(const uint4& raw, int token, int k, int T,
                                          float factor) const {
        if (ANY_F16) store_activations(f16, raw, token, k, T, factor, true);
        if (ANY_BF16) store_activations(bf16_rows, raw, token, k, T, factor, false);
    }
};

// silu(min(gate, limit)) * clamp(up, -limit, limit) * weight; NaN stays NaN.
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float weight, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.0f + expf(-gate)) * up * weight;
}

// One finished item: lanes 0..15 hold the gate rows, lanes 16..31 the up rows.
template <int FORMAT>
__device__ __forceinline__ void write_hidden(const Partials& partials, int item,
                                             const Routes& routes, const float* unscale,
                                             float global_scale, unsigned mask, int slot, int tile,
                                             char* h, int T, int F, float limit, int lane) {
    const int rows = __popc(mask);
    const int padded = (F + 63) / 64 * 64;
    // Four lanes have two pairs of rows each whose words are neighbours: the next two rows, or the
    // two that are 8 rows on.
    constexpr int NEXT = SPREADS ? 2 : 8;
    const int pair = lane / 2 % 8;
    const bool publishes = SPREADS ? lane < 16 && lane % 4 == 0 : lane < 8 && lane % 2 == 0;
    char* to = h + size_t(slot < 0 ? 0 : routes.first_row[slot]) * padded * 2 +
               size_t(tile >> 1) * rows * 64 + word_at((tile & 1) * 8 + pair);
    for (int token = 0; token < T; ++token) {
        if (!(mask >> token & 1)) continue;
        float value = partials.get(item, token, lane) * global_scale;
        if (FORMAT != BF16) value *= unscale[token];
        const float up = __shfl_xor_sync(~0u, value, 16);
        const float weight = slot < 0 ? 1.0f : routes.weight[slot][token];
        const bf16 hidden = __float2bfloat16_rn(clamped_swiglu(value, up, weight, limit));
        const unsigned bits = FORMAT == BF16
                                  ? __bfloat16_as_ushort(hidden)
                                  : __half_as_ushort(__float2half_rn(
                                        __bfloat162float(hidden) *
                                        inverse_power(routes.unscale[token])));
        const unsigned word = bits | __shfl_down_sync(~0u, bits, 1) << 16;
        const unsigned next = __shfl_down_sync(~0u, word, NEXT);
        if (publishes) publish(to, word, next);
        to += 64;
    }
}

// counters: the two words of LaunchNumber, then those of the score exchange. sums: words [blocks,
// T, 32] of SumExchange. h: two halves of half_bytes, each with room for T * (P + 1) rows of F,
// padded to 64, 16-bit values. All are zeros before the first launch. One block also writes the
// routes to ids_TP and weights_TP. Launches that share counters share h and sums, and their
// half_bytes are equal.
//
// In torch, with experts = ids_TP.unique(), which the comments of the stages below refer to:
//     log_score_TX = 0.5 * softplus(x_TE.float() @ gate.T).log()
//     score_TX = log_score_TX.exp() + bias_X
//     ids_TP = table_VP[tokens_T] if HASH else sort(score_TX, descending=True)[1][:, :P]  # stable
//     weights_TP = log_score_TX.gather(1, ids_TP).softmax(-1) * scaling
//     # h of the shared expert and of experts
//     gate, up = (x @ w1.T).clamp(max=limit), (x @ w3.T).clamp(-limit, limit)
//     h = (silu(gate) * up * weight).bfloat16()
//     y_TE = sum(h.float() @ w2.T).bfloat16()  # over the shared expert and experts
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_decode(const bf16* x_TE, const char* gate, const float* bias_X, const int64* table_VP,
               const int64* tokens_T, const char* w1_data, const char* w1_block_scale,
               const float* w1_global_scale, const char* w3_data, const char* w3_block_scale,
               const float* w3_global_scale, const char* w2_data, const char* w2_block_scale,
               const float* w2_global_scale, const char* shared_w1_data,
               const char* shared_w1_block_scale, const float* shared_w1_global_scale,
               const char* shared_w3_data, const char* shared_w3_block_scale,
               const float* shared_w3_global_scale, const char* shared_w2_data,
               const char* shared_w2_block_scale, const float* shared_w2_global_scale, char* h,
               bf16* y_TE, int64* ids_TP, float* weights_TP, int* nan, int* counters, int* sums,
               int half_bytes, const int64* peers, int64 slot, int exchange, int T, int V,
               float limit, float scaling) {
    if (knows_tokens(TOKENS)) T = TOKENS;
    constexpr int E = WIDTH, F = INNER, X = EXPERTS, P = EXPERTS_PER_TOKEN;
    extern __shared__ __align__(SLOT_LINE_BYTES) char dynamic_shared[];
    __shared__ Routes routes;
    __shared__ unsigned long long barriers[2 * BUFFERS + 2 + BATCHES];
    __shared__ __align__(16) float largest[MAX_TOKENS * WARPS];
    __shared__ float unscale[MAX_TOKENS];
    __shared__ Outbox outbox;
    __shared__ __align__(16) uint4 zeros[ZEROS];
    const int warp = warp_index(), lane = threadIdx.x % WARP;
    const int activation_bytes = (int(ANY_F16) + int(ANY_BF16)) * T * stage_padded(E) * 2;
    assert_shared_memory(WARPS * STAGES * PAIR_BYTES + BUFFERS * WARPS * PARTIAL * 4 +
                         activation_bytes);
    assert_shared_memory(WARPS * (STAGES * PAIR_BYTES + BATCHES * ROUNDS * PARTIAL * 4 +
                                  HiddenSlice::BYTES));

    float* partial_data = reinterpret_cast<float*>(dynamic_shared + WARPS * STAGES * PAIR_BYTES);
    // x; in phase 2 more sums and a slice of h for every warp.
    char* after = reinterpret_cast<char*>(partial_data + BUFFERS * WARPS * PARTIAL);
    Inputs inputs = {after, after + (ANY_F16 ? T * stage_padded(E) * 2 : 0), largest};
    const unsigned ring = shared_address(dynamic_shared) + own_warp() * STAGES * PAIR_BYTES;
    const unsigned full = shared_address(barriers);
    const unsigned empty = full + 8 * BUFFERS;
    const unsigned known = empty + 8 * BUFFERS;
    const unsigned weighed = known + 8;
    const unsigned added = weighed + 8;
    const unsigned no_activations = shared_address(zeros);
    const RouteTable table(routes);

    const Partials partials = {partial_data, full, empty};

    // This block's rows of gate, on their way to registers.
    GateRows gate_rows;
    gate_rows.request(gate, E, X);
    const LaunchNumber launch = {reinterpret_cast<unsigned long long*>(counters)};

    // Phase 1: routes, then h.
    int first_item;
    unsigned launch_number;
    {
        const Layout<ROUTED> routed(F, E);
        const Layout<SHARED> shared(F, E);
        const int tiles = (F + 63) / 64 * 4;
        GateUpItems producer(tiles, shared.stages(), routed.stages(),
                             shared.tile_bytes + shared.scale_tile_bytes,
                             routed.tile_bytes + routed.scale_tile_bytes, warp);
        GateUpItems items = producer;
        const auto issue = [&](int place) {
            const unsigned slot = ring + place * PAIR_BYTES;
            if (producer.slot < 0) {
                shared.fetch(slot, shared_w1_data, shared_w1_block_scale, 0, producer.tile,
                             producer.stage, lane);
                shared.fetch(slot + TILE_BYTES, shared_w3_data, shared_w3_block_scale, 0,
                             producer.tile, producer.stage, lane);
            } else {
                const int expert = table.expert(producer.slot);
                routed.fetch(slot, w1_data, w1_block_scale, expert, producer.tile, producer.stage,
                             lane);
                routed.fetch(slot + TILE_BYTES, w3_data, w3_block_scale, expert,
                             producer.tile, producer.stage, lane);
            }
            producer.stage += WARPS;
            producer.settle();
        };
        // The first stages of shared.w1 and shared.w3, on their way to the ring.
        // Empty slots of the ring. The last STAGES groups of copies are those of the next STAGES
        // stages, in order.
        int vacant = 0;
        producer.settle();
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) {
            if (producer.active()) issue(i);
            else ++vacant;
            cp_async_commit();
        }
        routes_clear(routes);
        if (threadIdx.x < BUFFERS) {
            barrier_init(full + 8 * threadIdx.x, WARPS * ARRIVALS);
            barrier_init(empty + 8 * threadIdx.x, ARRIVALS);
        }
        if (threadIdx.x < BATCHES) barrier_init(added + 8 * threadIdx.x, T * ARRIVALS);
        if (threadIdx.x == 0) barrier_init(known, WARP), barrier_init(weighed, T * WARP);
        if (threadIdx.x < ZEROS) zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
        barrier_fence();
        __syncthreads();

        if (!HASH && threadIdx.x * 32 < X) prefetch_l2(bias_X + threadIdx.x * 32);

        pdl_wait();
        if (RANKS > 1 && warp == WARPS - 1) outbox.open(peers, slot, exchange);
        const unsigned number = launch.read();
        launch_number = number + 1;
        const ScoreExchange scores = {reinterpret_cast<unsigned long long*>(counters + 2),
                                      launch_number};
        // Asked for before x, and looked up behind it: x would wait for it.
        const int64 id_of_token = HASH && warp < T ? __ldcg(tokens_T + warp) : 0;
        // x_TE.abs().amax(-1), and this thread's columns of x_TE.float() @ gate.T
        inputs.measure(x_TE, T, E, gate_rows, partial_data);
        __syncthreads();
        const int64 listed = HASH && warp < T ? listed_expert(table_VP, id_of_token, V) : 0;
        // log_score_TX = 0.5 * softplus(x_TE.float() @ gate.T).log(): this block's rows of gate, to
        // all blocks
        scores.send(partial_data, T, X);
        // (x_TE / unscale).half() and x_TE itself, whichever of them the formats multiply
        inputs.stage(x_TE, T, E, unscale);
        __syncthreads();
        // ids_TP = table_VP[tokens_T] or the P largest of log_score_TX.exp() + bias_X
        // weights_TP = log_score_TX.gather(1, ids_TP).softmax(-1) * scaling
        // experts = ids_TP.unique(); mask = (ids_TP == expert).any(-1) of each
        if (warp < T) {
            float score[PER_LANE], bias[PER_LANE] = {};
            if (!HASH) load_bias(bias, bias_X, X);
            // Also where the experts come from a table: once they are known their weights are
            // requested, and the scores would queue behind these.
            scores.receive(score, warp, X);
            const int64 id = choose(score, bias, listed);
            const bool valid = lane < P && id >= 0 && id < X;
            int slot;
            if constexpr (TOKENS == 1) {
                slot = routes_of_one(routes, id, valid);
            } else {
                const unsigned again = routes_count(routes, id, warp, valid);
                choosers_sync(T);
                slot = routes_enter(routes, id, warp, valid, again);
                choosers_sync(T);
                if (warp == 0) routes_finish(routes, T);
            }
            if (warp == 0) barrier_arrive(known);
            const float weight = weigh(score, id, scaling);
            routes_weigh(routes, slot, weight, warp, valid, limit);
            barrier_arrive(weighed);
            if (lane < P && blockIdx.x == 0) {
                ids_TP[warp * P + lane] = id, weights_TP[warp * P + lane] = weight;
                note_nan(nan, weight);
            }
        }
        const WordHalves hidden_halves = {h, half_bytes};
        hidden_halves.clear_before(number, BLOCKS);
        h = hidden_halves.of(number);

        const int token = min(lane_token(lane), T - 1);
        const unsigned lane_address = token * 64 + lane_part(lane);
        const unsigned x_f16 = shared_address(inputs.f16) + lane_address;
        const unsigned x_bf16 = shared_address(inputs.bf16_rows) + lane_address;
        // h[rows of the expert] = (silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) *
        // weight).bfloat16()
        const auto finish = [&](int number) {
            if (number < 0 || !Partials::mine(number, warp)) return;
            GateUpItems past = items;
            past.number = number;
            past.place();
            const bool is_shared = past.slot < 0;
            // Up and gate rows may have different global scales.
            const float* shared_global =
                lane < 16 ? shared_w1_global_scale : shared_w3_global_scale;
            const float* routed_global = lane < 16 ? w1_global_scale : w3_global_scale;
            float global_scale = is_shared ? format_factor<SHARED>() : format_factor<ROUTED>();
            if (is_shared && SHARED == NVFP4) global_scale *= __ldg(shared_global);
            if (!is_shared && ROUTED == NVFP4)
                global_scale *= __ldg(routed_global + routes.experts[past.slot]);
            // The shared expert's hidden rows, too, are scaled by what the routes allow.
            barrier_wait(weighed, 0);
            partials.begin_get(number);
            if (is_shared)
                write_hidden<SHARED>(partials, number, routes, unscale, global_scale, (1u << T) - 1,
                                     -1, past.tile, h, T, F, limit, lane);
            else
                write_hidden<ROUTED>(partials, number, routes, unscale, global_scale,
                                     routes.mask[past.slot], past.slot, past.tile, h, T, F, limit,
                                     lane);
            partials.end_get(number, lane);
        };
        Sums sums = {};
        // `part`: the first stage of this warp in the item, or where it would be.
        int place = 0, part = warp;
        bool routes_known = false;
        // gate, up = x_TE[mask] @ w1.T, x_TE[mask] @ w3.T for shared and every one of experts.
        // A turn is a stage of this warp or the end of an item. The shared expert's stages do not
        // wait for the routes.
#pragma unroll 1
        while (true) {
            if (!routes_known && (!items.active() || __any_sync(~0u, barrier_test(known, 0)))) {
                barrier_wait(known, 0);
                routes_known = true;
                items.start_routed(routes.count * tiles);
                producer.start_routed(routes.count * tiles);
                producer.settle();
#pragma unroll 1
                for (; vacant > 0; --vacant) {
                    if (producer.active()) issue((place + STAGES - vacant) % STAGES);
                    cp_async_commit();
                }
            }
            if (!items.active()) break;
            if (items.stage < items.stages()) {
                const unsigned slot = ring + place * PAIR_BYTES;
                cp_async_wait<STAGES - 1>();
                __syncwarp();
                if (items.slot < 0) {
                    const unsigned x = SHARED == BF16 ? x_bf16 : x_f16;
                    multiply_stage<SHARED>(
                        sums, slot,
                        {x + items.stage * (Stage<SHARED>::COLUMNS * 2) * T, no_activations, T * 64,
                         true},
                        lane);
                } else {
                    const unsigned x = ROUTED == BF16 ? x_bf16 : x_f16;
                    multiply_stage<ROUTED>(
                        sums, slot,
                        {x + items.stage * (Stage<ROUTED>::COLUMNS * 2) * T, no_activations, T * 64,
                         true},
                        lane);
                }
                __syncwarp();
                if (producer.active()) issue(place);
                else ++vacant;
                cp_async_commit();
                if (++place == STAGES) place = 0;
                items.stage += WARPS;
            } else {
                items.stage -= items.stages();
                // The item before is finished now, when no warp is likely to be behind in it:
                // waiting here would add up.
                partials.put(items.number, sums, part, lane);
                part = items.stage;
                finish(items.number - 1);
                items.next_item();
                sums = {};
            }
        }
        finish(items.number - 1);
        // Global scales of w2, times what the formats' decoding leaves out; by a warp that had
        // nothing to finish.
        if (Partials::mine(items.number, warp)) {
            for (int i = lane; i <= routes.count; i += WARP) {
                if (i == 0)
                    routes.units[0] = format_factor<SHARED>() *
                                      (SHARED == NVFP4 ? __ldg(shared_w2_global_scale) : 1.0f);
                else
                    routes.units[i] =
                        format_factor<ROUTED>() *
                        (ROUTED == NVFP4 ? __ldg(w2_global_scale + routes.experts[i - 1]) : 1.0f);
            }
        }
        first_item = items.number;
    }

    // Phase 2: y_TE.
    if (threadIdx.x == 0) launch.end();
    pdl_launch();
    {
        const Layout<ROUTED> routed(E, F);
        const Layout<SHARED> shared(E, F);
        const unsigned hidden = shared_address(partial_data + BATCHES * ROUNDS * WARPS * PARTIAL) +
                                warp * HiddenSlice::BYTES;
        const int pairs = (E + 63) / 64 * 2, hidden_k32 = (F + 63) / 64 * 2;
        const DownLine line(pairs, shared.stages(), routed.stages(), routes.count);

        // Row tiles `begin` to `end` of the two of a stage.
        const auto fetch_weights = [&](const DownStage& from, int place, int begin, int end) {
            const unsigned to = ring + place * PAIR_BYTES;
            if (from.slot < 0) {
#pragma unroll
                for (int tile = begin; tile < end; ++tile)
                    shared.fetch(to + tile * TILE_BYTES, shared_w2_data,
                                 shared_w2_block_scale, 0, 2 * from.pair + tile, from.stage, lane);
            } else {
                const int expert = table.expert(from.slot);
#pragma unroll
                for (int tile = begin; tile < end; ++tile)
                    routed.fetch(to + tile * TILE_BYTES, w2_data, w2_block_scale, expert,
                                 2 * from.pair + tile, from.stage, lane);
            }
        };

        DownStage producer(line, warp);
        // The stage whose hidden rows were requested last.
        DownStage next = producer;

        // h of this warp's stages, one slice after the other.
        HiddenSlice slice;
        const auto request = [&] {
            slice.units = 0;
            if (next.active(line)) {
                const int slot = next.slot;
                const int rows = TOKENS == 1 ? 1 : slot < 0 ? T : __popc(table.mask(slot));
                const int first_row = TOKENS == 1 ? slot + 1
                                      : slot < 0  ? 0
                                                  : table.first_row(slot);
                int k32 = (slot < 0 ? Stage<SHARED>::COLUMNS : Stage<ROUTED>::COLUMNS) / 32;
                slice.from = h + unsigned(first_row * hidden_k32 + next.stage * k32 * rows) * 64;
                if (TAILS) k32 = min(k32, hidden_k32 - next.stage * k32);
                slice.units = k32 * rows * 4;
            }
            // Also where none is left, so that the registers of the one before are free.
            slice.request(0, lane);
        };

        // The first stages of w2 go to the ring while h comes: WAITING_TILES at a time, when those
        // before them have landed, and all the rest behind the first slice. Every stage ends with
        // the end of a group of copies.
        bool here = false;
        int tiles = 0;
        const Deadline deadline;
        request();
#pragma unroll 1
        while (true) {
            const int until = here ? 2 * STAGES : min(tiles + WAITING_TILES, 2 * STAGES);
#pragma unroll 1
            for (; tiles < until; ++tiles) {
                const int tile = tiles % 2;
                if (producer.active(line)) fetch_weights(producer, tiles / 2, tile, tile + 1);
                if (tile == 1) producer.advance(line);
                if (tile == 1 || tiles + 1 == until) cp_async_commit();
            }
            if (here) break;
            here = slice.complete();
            if (!here) {
                deadline.check();
                if (tiles < 2 * STAGES) cp_async_wait<0>();
                slice.request(0, lane);
            }
        }
        // No warp of the block reads x any more, whose place h takes, and `units` are there. After
        // a loop with a vote it is also what tells the compiler that warps are whole: otherwise a
        // stage's copies take 14 instructions more.
        __syncthreads();
        const int token = lane_token(lane);
        // Hidden rows of BF16 experts are not scaled; the sums are, when other experts' rows are.
        const int held = lane % 4 / TOKEN_LANES * LANE_TOKENS;
        const float first = ANY_BF16 ? 1.0f / routes.unscale[min(held, T - 1)] : 1.0f;
        const float second = ANY_BF16 ? 1.0f / routes.unscale[min(held + 1, T - 1)] : 1.0f;
        // y_TE = y.bfloat16(), or this rank's part of y for all ranks
        const auto store = [&](int token, int row, float value) {
            const size_t at = size_t(token) * E + row;
            if constexpr (RANKS > 1) outbox.push(at, value);
            else y_TE[at] = __float2bfloat16_rn(value);
        };
        const SumExchange between = {reinterpret_cast<unsigned long long*>(sums), launch_number};
        // Each of T warps adds the parts of a batch to y of its token, one after the other.
        const int own = WARPS - 1 - warp;
        float sum = 0.0f;
        const auto finish = [&](int batch) {
            if (batch < 0 || own >= T) return;
            const int first = batch * ROUNDS * WARPS;
            const int end = min(first + ROUNDS * WARPS, line.count);
            const float* from =
                partials.row(batch % BATCHES * ROUNDS * WARPS, lane) + own * 16 - first * PARTIAL;
            int index = first;
            DownRun run = line.run(index, end);
            partials.begin_get(first_item + batch);
#pragma unroll 1
            while (true) {
                if (run.receives) sum = between.receive(blockIdx.x * T + own, lane);
                else if (run.starts) sum = 0.0f;
#pragma unroll 16
                for (int part = 0; part < run.parts; ++part) sum += from[(index + part) * PARTIAL];
                const int row = run.pair * 32 + lane;
                if (run.sends) between.send((blockIdx.x + 1) * T + own, lane, sum);
                else if (run.completes && row < E) store(own, row, sum * routes.unscale[own]);
                index += run.parts;
                if (index >= end) break;
                run = line.run(index, end);
            }
            __syncwarp();
            if (lane < ARRIVALS) barrier_arrive(added + 8 * (batch % BATCHES));
        };
        int place = 0;
        // y = sum(h[rows of the expert].float() @ w2.T) over shared and experts: 32 rows of w2 at a
        // time
        const int rounds = (line.count + WARPS - 1) / WARPS;
#pragma unroll 1
        for (int round = 0; rounds > 0; ++round) {
            if (round < rounds) {
                const int batch = round / ROUNDS;
                if (round % ROUNDS == 0 && batch >= BATCHES)
                    barrier_wait(added + 8 * (batch % BATCHES), batch / BATCHES & 1 ^ 1);
                Sums sums = {};
                // What the sums lack, of the lane's first and second token.
                float low = 1.0f, high = 1.0f;
                bool more = round * WARPS + warp < line.count;
#pragma unroll 1
                while (more) {
                    const unsigned at = ring + place * PAIR_BYTES;
                    const int expert = next.slot;
                    more = !next.ends(line);
                    const unsigned mask =
                        expert < 0 || TOKENS == 1 ? (1u << T) - 1 : table.mask(expert);
                    const int rank = TOKENS == 1 ? 0 : __popc(mask & ((1u << token) - 1));
                    const Activations x = {hidden + rank * 64 + lane_part(lane), no_activations,
                                           __popc(mask) * 64, (mask >> token & 1) != 0};
                    if ((expert < 0 ? SHARED : ROUTED) == BF16) low = first, high = second;
                    else low = high = table.unit(expert);
                    slice.take(hidden, lane);
                    next.advance(line);
                    if (HIDDEN_AHEAD) request();
                    cp_async_wait<STAGES - 1>();
                    __syncwarp();
                    if (expert < 0) multiply_stage<SHARED>(sums, at, x, lane);
                    else multiply_stage<ROUTED>(sums, at, x, lane);
                    __syncwarp();
                    if (!HIDDEN_AHEAD) request();
                    if (producer.active(line)) {
                        fetch_weights(producer, place, 0, 2);
                        producer.advance(line);
                    }
                    cp_async_commit();
                    if (++place == STAGES) place = 0;
                }
                partials.store(round % (BATCHES * ROUNDS) * WARPS + warp, sums, low, high, lane);
                if (round % ROUNDS == ROUNDS - 1 || round == rounds - 1)
                    partials.arrive(first_item + batch, lane);
            }
            // A batch is finished a round later, when no warp is likely to be behind in it.
            const bool last = round == rounds;
            if (last || round % ROUNDS == 0) finish((round + (last ? ROUNDS - 1 : 0)) / ROUNDS - 1);
            if (last) break;
        }
    }
}
