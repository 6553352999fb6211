// Routing inside the decode launch of the experts. Every block multiplies some rows of the gate
// with all tokens and sends the scores to all blocks; every block then chooses the experts of the
// step for itself, all of them alike.
//
// Which experts there are is known before their weights: the first lets their bytes be requested,
// the second is needed when the first of them is finished.
//
// Defines: those of moe_decode.cu and router.cuh; GATE_ROUNDS (pairs of gate rows per block).
#pragma once
#include "router.cuh"
#include "weight_tile.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int MAX_ENTRIES = 128, MAX_TOKENS = MAX_DECODE_TOKENS;
constexpr int GATE_ROWS = 2 * GATE_ROUNDS, GATE_PLACES = power_of_two(GATE_ROWS);

// ---- numbered words -----------------------------------------------------------------------------

// A value on its way between blocks, with the number of the launch in the high half: one that has
// arrived says so itself, and nothing has to be reset. Launches that share words have different
// numbers, none is 0.
using NumberedWord = unsigned long long;

__device__ __forceinline__ NumberedWord numbered(unsigned launch, float value) {
    return (unsigned long long)launch << 32 | __float_as_uint(value);
}

__device__ __forceinline__ void store_word(NumberedWord* to, NumberedWord word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

__device__ __forceinline__ NumberedWord load_word(const NumberedWord* from) {
    NumberedWord word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}

// ---- scores -------------------------------------------------------------------------------------

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

// ---- routes -------------------------------------------------------------------------------------

// The distinct experts of the step in ascending order ("slots"), and which tokens go to them. In h,
// the rows of the shared expert (all tokens) come first, then those of each slot, ascending tokens.
struct Routes {
    // A bit per expert, and how many experts a token lists again.
    unsigned members[WARP];
    int repeats[MAX_TOKENS];
    int experts[MAX_ENTRIES], first_row[MAX_ENTRIES];
    unsigned mask[MAX_ENTRIES];
    float weight[MAX_ENTRIES][MAX_TOKENS];
    // 1 / (what h of a token is multiplied with so that it fits into f16)
    float unscale[MAX_TOKENS];
    int count;
    // What the sums of w2 lack, of the shared expert and then of each slot.
    float units[MAX_ENTRIES + 1];
};

// What the loops over stages look up of the routes, by addresses that stay in registers: of a
// variable in shared memory the compiler asks for the address again at every use.
struct RouteTable {
    unsigned experts, first_rows, masks, units;

    __device__ __forceinline__ explicit RouteTable(const Routes& routes)
        : experts(shared_address(routes.experts)), first_rows(shared_address(routes.first_row)),
          masks(shared_address(routes.mask)), units(shared_address(routes.units)) {}

    __device__ __forceinline__ int expert(int slot) const {
        return load_shared4(experts + 4 * slot);
    }
    __device__ __forceinline__ int first_row(int slot) const {
        return load_shared4(first_rows + 4 * slot);
    }
    __device__ __forceinline__ unsigned mask(int slot) const {
        return load_shared4(masks + 4 * slot);
    }
    // -1: of the shared expert.
    __device__ __forceinline__ float unit(int slot) const {
        return __uint_as_float(load_shared4(units + 4 * (slot + 1)));
    }
};

// Constants only: runs before pdl_wait.
__device__ __forceinline__ void routes_clear(Routes& routes) {
    for (int i = threadIdx.x; i < MAX_ENTRIES; i += THREADS) {
        routes.experts[i] = -1;
        routes.mask[i] = 0;
        if (i < WARP) routes.members[i] = 0;
    }
}

// The power of two that brings `bound` into [2^14, 2^15).
__device__ __forceinline__ float f16_factor(float bound) {
    return __uint_as_float(activation_factor(bound));
}

__device__ __forceinline__ float inverse_power(float power_of_two) {
    return __uint_as_float((254u << 23) - __float_as_uint(power_of_two));
}

// A barrier of the warps that choose, one per token.
__device__ __forceinline__ void choosers_sync(int T) {
    asm volatile("bar.sync 1, %0;" ::"r"(T * WARP) : "memory");
}

__device__ __forceinline__ int inclusive_sum(int value) {
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const int other = __shfl_up_sync(~0u, value, offset);
        if (int(threadIdx.x % WARP) >= offset) value += other;
    }
    return value;
}

// The lanes p < P whose expert a lower lane of the token has, too, and of all of them the lowest
// ones. Ids of lanes that have no expert are their own.
struct Repeats {
    int ids[EXPERTS_PER_TOKEN];
    unsigned again, firsts;

    __device__ __forceinline__ Repeats(int id, bool valid) {
        const int lane = threadIdx.x % WARP;
        bool first = true;
#pragma unroll
        for (int p = 0; p < EXPERTS_PER_TOKEN; ++p) {
            ids[p] = __shfl_sync(~0u, id, p);
            if (p < lane && ids[p] == id) first = false;
        }
        firsts = __ballot_sync(~0u, valid && first);
        again = __ballot_sync(~0u, valid && !first);
    }
};

// The routes of the only token: lane p < P has the id of its p-th expert, if that is valid, and
// gets its slot.
__device__ __forceinline__ int routes_of_one(Routes& routes, int64 id, bool valid) {
    const int lane = threadIdx.x % WARP;
    const int own = valid ? int(id) : -1 - lane;
    const Repeats repeats(own, valid);
    // Experts ascending, and behind them those that the token lists again.
    int slot = 0;
#pragma unroll
    for (int p = 0; p < EXPERTS_PER_TOKEN; ++p)
        slot += (repeats.firsts >> p & 1) != 0 && repeats.ids[p] < own;
    const unsigned below = (1u << lane) - 1;
    if (repeats.again >> lane & 1) slot = __popc(repeats.firsts) + __popc(repeats.again & below);
    if (valid) {
        routes.experts[slot] = own;
        routes.mask[slot] = 1;
        routes.first_row[slot] = 1 + slot;
    }
    if (lane == 0) routes.count = __popc(repeats.firsts | repeats.again);
    return slot;
}

// A token's warp counts its experts in; lane p < P has the p-th one. Returns the lanes whose expert
// a lower lane has, too.
__device__ __forceinline__ unsigned routes_count(Routes& routes, int64 id, int token, bool valid) {
    const int lane = threadIdx.x % WARP;
    if (valid) atomicOr(&routes.members[id >> 5], 1u << (id & 31));
    const Repeats repeats(valid ? int(id) : -1 - lane, valid);
    if (lane == 0) routes.repeats[token] = __popc(repeats.again);
    return repeats.again;
}

// After a barrier that follows routes_count. Lane p < P gets the slot of the p-th expert.
__device__ __forceinline__ int routes_enter(Routes& routes, int64 id, int token, bool valid,
                                            unsigned again) {
    const int lane = threadIdx.x % WARP, own = valid ? int(id) : 0;
    const unsigned below = (1u << lane) - 1;
    int slot = 0, distinct = 0;
#pragma unroll
    for (int word = 0; word < PER_LANE; ++word) {
        const unsigned members = routes.members[word];
        if (word < own >> 5) slot += __popc(members);
        if (word == own >> 5) slot += __popc(members & ((1u << (own & 31)) - 1));
        distinct += __popc(members);
    }
    if (again >> lane & 1) {
        // An expert that a token lists again counts, and rounds, again: in a slot of its own behind
        // all others.
        slot = distinct + __popc(again & below);
        for (int t = 0; t < token; ++t) slot += routes.repeats[t];
    }
    if (valid) {
        atomicOr(&routes.mask[slot], 1u << token);
        atomicMax(&routes.experts[slot], own);
    }
    return slot;
}

// One warp, after a barrier that follows routes_enter.
__device__ __forceinline__ void routes_finish(Routes& routes, int T) {
    int row = T, count = 0;
    for (int base = 0; base < MAX_ENTRIES; base += WARP) {
        const int slot = base + threadIdx.x;
        const int rows = __popc(routes.mask[slot]);
        const int sum = inclusive_sum(rows);
        routes.first_row[slot] = row + sum - rows;
        row += __shfl_sync(~0u, sum, WARP - 1);
        const unsigned used = __ballot_sync(~0u, rows > 0);
        count += __popc(used);
        if (used != ~0u) break;
    }
    if (threadIdx.x == 0) routes.count = count;
}

// The weights of a token: lane p < P has that of the p-th expert, and its slot. |h| of a token is
// at most limit^2 times the sum of its weights.
__device__ __forceinline__ void routes_weigh(Routes& routes, int slot, float weight, int token,
                                             bool valid, float limit) {
    const int lane = threadIdx.x % WARP;
    if (valid) routes.weight[slot][token] = weight;
    const float total = warp_sum(lane < EXPERTS_PER_TOKEN ? fabsf(weight) : 0.0f);
    if (lane == 0)
        routes.unscale[token] =
            ANY_F16 ? inverse_power(f16_factor(limit * fmaxf(limit, 1.0f) * fmaxf(total, 1.0f)))
                    : 1.0f;
}
