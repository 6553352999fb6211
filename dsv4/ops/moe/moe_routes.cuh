// Routing inside the decode launch of the experts. Every block has the scores of all experts
// (moe_scores.cuh) and chooses the experts of the step for itself, all of them alike.
//
// Which experts there are is known before their weights: the first lets their bytes be requested,
// the second is needed when the first of them is finished.
//
// Defines: those of moe_decode.cu.
#pragma once
#include "f16_factor.cuh"
#include "moe_shape.cuh"
#include "ptx.cuh"
#include "router.cuh"

constexpr int MAX_ENTRIES = 128;

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

// The routes of all tokens of the step, one warp for each: lane p < P has the id of the token's
// p-th expert, if that is valid, and gets its slot. All are there when the first warp has returned.
__device__ __forceinline__ int routes_of(Routes& routes, int64 id, int token, bool valid, int T) {
    if constexpr (TOKENS == 1) return routes_of_one(routes, id, valid);
    const unsigned again = routes_count(routes, id, token, valid);
    choosers_sync(T);
    const int slot = routes_enter(routes, id, token, valid, again);
    choosers_sync(T);
    if (token == 0) routes_finish(routes, T);
    return slot;
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
