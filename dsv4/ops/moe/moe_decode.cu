// Router and mixture of experts for 1 to 8 tokens in one launch that streams every weight once.
//
//   routing  scores of all experts, shared out over the blocks and exchanged (moe_scores.cuh),
//            while the first weights of phase 1 are on their way
//   phase 1  h = round(weight * silu(min(w1 x, limit)) * clamp(w3 x, limit)) for the shared expert
//            and every distinct routed expert of the step
//   phase 2  y = sum over those experts of w2 h, one list of K per 32 output rows
//
// One block per multiprocessor. Blocks never meet: scores, h and sums on their way between blocks
// are words that say themselves that they have arrived (moe_scores.cuh, moe_hidden.cuh,
// moe_down_line.cuh). A work item is a part of K of two row tiles of 16 (gate and up rows, or two
// tiles of the output). Its stages are dealt to the warps of a block; each warp streams its own
// stages through its own ring in shared memory, so that no warp waits for another one's loads. The
// warps' sums meet in shared memory and one warp finishes the item.
//
// A token gets the same bits in a step of any length, beside any other tokens: every order of
// summation goes with the shapes, the number of warps and the token's own experts. In phase 1 part
// i of an item's sum is of the stages i, i + WARPS, ..., whichever warp has them; in phase 2 see
// moe_down_line.cuh.
//
// Defines: the shape, so that what goes with it alone is computed when the kernel is compiled:
// WIDTH (E), INNER (F), EXPERTS (X), EXPERTS_PER_TOKEN (P), BLOCKS (of the launch). ROUTED, SHARED
// (weight formats), TOKENS (1 to 8, as many as the launch has), TAILS (1: E or F is no multiple of
// a stage's columns), WARPS, STAGES (ring depth), LOADS_AT_ONCE (loads of a stage that are decoded
// side by side: 2 or 4), VECTORS (eights of activations of a token per thread), TOKENS_AT_ONCE
// (whose activations a thread holds), RANKS (above 1: y goes to the ranks as words, exchange.cuh),
// and those of moe_scores.cuh and router.cuh.
#include "exchange.cuh"
#include "moe_block.cuh"
#include "moe_down.cuh"
#include "moe_down_line.cuh"
#include "moe_gate_up.cuh"
#include "moe_hidden.cuh"
#include "moe_inputs.cuh"
#include "moe_layout.cuh"
#include "moe_products.cuh"
#include "moe_routes.cuh"
#include "moe_scores.cuh"
#include "moe_sums.cuh"

// Row tiles of w2 (2.3 KB) that a warp has in flight while it waits for its first hidden rows; all
// of the ring are 2 * STAGES. Every trip of a block through L2, also to look for h, queues behind
// what the block has in flight: 350 clocks behind nothing, 525 behind 32 KB, 1,240 behind 64 KB. 24
// to 32 KB are enough to keep the memory busy.
constexpr int WAITING_TILES = 1;

// Whether a stage's hidden rows are on their way to registers during the products of the stage
// before it. With a ring of one stage, whose weights are requested behind these, nothing is gained
// by it.
constexpr bool HIDDEN_AHEAD = STAGES > 1;

static_assert(WARPS >= TOKENS, "a warp per token chooses its experts");
static_assert(GATE_ROWS <= BUFFERS * PARTIAL / TOKENS,
              "the warps' parts of the logits lie where those of an item will");

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
    __shared__ unsigned long long barrier_words[BARRIERS];
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
    const Barriers barriers(barrier_words);
    const unsigned no_activations = shared_address(zeros);
    const RouteTable table(routes);

    const Partials partials = {partial_data, barriers.full, barriers.empty};
    const Block block = {warp, lane, T, barriers, ring, no_activations, partials, routes, table};
    const Experts routed_weights = {{w1_data, w1_block_scale, w1_global_scale},
                                    {w3_data, w3_block_scale, w3_global_scale},
                                    {w2_data, w2_block_scale, w2_global_scale}};
    const Experts shared_weights = {
        {shared_w1_data, shared_w1_block_scale, shared_w1_global_scale},
        {shared_w3_data, shared_w3_block_scale, shared_w3_global_scale},
        {shared_w2_data, shared_w2_block_scale, shared_w2_global_scale}};

    // This block's rows of gate, on their way to registers.
    GateRows gate_rows;
    gate_rows.request(gate, E, X);
    const LaunchNumber launch = {reinterpret_cast<unsigned long long*>(counters)};

    // Phase 1: routes, then h.
    int first_item;
    unsigned launch_number;
    {
        GateUpStream stream(block, routed_weights, shared_weights);
        const GateUpItems items = stream.items;
        // The first stages of shared.w1 and shared.w3, on their way to the ring.
        stream.start();
        routes_clear(routes);
        barriers.initialize(T);
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
            const int slot = routes_of(routes, id, warp, valid, T);
            if (warp == 0) barrier_arrive(barriers.known);
            const float weight = weigh(score, id, scaling);
            routes_weigh(routes, slot, weight, warp, valid, limit);
            barrier_arrive(barriers.weighed);
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
        GateUp gate_up = {block,
                          stream,
                          items,
                          shared_address(inputs.f16) + lane_address,
                          shared_address(inputs.bf16_rows) + lane_address,
                          unscale,
                          h,
                          limit};
        Sums sums = {};
        first_item = gate_up.compute(sums);
        // Global scales of w2, times what the formats' decoding leaves out; by a warp that had
        // nothing to finish.
        if (Partials::mine(first_item, warp)) {
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
    }

    // Phase 2: y_TE.
    if (threadIdx.x == 0) launch.end();
    pdl_launch();
    {
        const DownWeights weights = {block, routed_weights.w2, shared_weights.w2,
                                     Layout<ROUTED>(E, F), Layout<SHARED>(E, F)};
        const unsigned hidden = shared_address(partial_data + BATCHES * ROUNDS * WARPS * PARTIAL) +
                                warp * HiddenSlice::BYTES;
        const int pairs = (E + 63) / 64 * 2, hidden_k32 = (F + 63) / 64 * 2;
        const DownLine line(pairs, weights.shared.stages(), weights.routed.stages(),
                            routes.count);

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
                if (producer.active(line)) weights.request(producer, tiles / 2, tile, tile + 1);
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
        DownSums down_sums = {block,
                              line,
                              {reinterpret_cast<unsigned long long*>(sums), launch_number},
                              first_item,
                              outbox,
                              y_TE,
                              WARPS - 1 - warp,
                              0.0f};
        int place = 0;
        // y = sum(h[rows of the expert].float() @ w2.T) over shared and experts: 32 rows of w2 at a
        // time
        const int rounds = (line.count + WARPS - 1) / WARPS;
#pragma unroll 1
        for (int round = 0; rounds > 0; ++round) {
            if (round < rounds) {
                const int batch = round / ROUNDS;
                if (round % ROUNDS == 0 && batch >= BATCHES)
                    barrier_wait(barriers.added + 8 * (batch % BATCHES), batch / BATCHES & 1 ^ 1);
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
                        weights.request(producer, place, 0, 2);
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
            if (last || round % ROUNDS == 0)
                down_sums.finish((round + (last ? ROUNDS - 1 : 0)) / ROUNDS - 1);
            if (last) break;
        }
    }
}
