// The usual way to select: by blocks that hold all orders of a token in registers.
//
// Scores are counted in bins of equal width between the least and the largest one, so that few are
// in the bin of the last selected score: what lies above it is selected, and those few are ranked.
// Where they are too many, or bins have no width, select_any of top_k.cuh selects.
#pragma once
#include "top_k.cuh"
#include <math_constants.h>

namespace top_k {

constexpr int HELD = STRIPS * LANE_ENTRIES;  // by a thread
static_assert(STRIPS % 4 == 0 && HELD <= 32 && WARPS <= WARP);

// The score of which order_of made this.
__device__ __forceinline__ float score_of(unsigned order) {
    const unsigned positive = (int)order >> 31;
    return __uint_as_float((order ^ ~positive) & ~(positive & 0x80000000u));
}

// Bins are floats, the numbers from FIRST on. The first one has no score but −∞.
struct EqualBins {
    static constexpr float FIRST = 0x1p23f;
    float least, per_score;

    __device__ __forceinline__ EqualBins(unsigned least_order, unsigned largest_order)
        : least(score_of(least_order)),
          per_score(__fdividef(BINS - 2, score_of(largest_order) - least)) {}

    // Not where all scores are equal, or one of them is NaN or infinite.
    __device__ __forceinline__ bool are_usable() const {
        return per_score > 0.0f && per_score < CUDART_INF_F;
    }

    // No larger score is in a lower bin.
    __device__ __forceinline__ float bin(unsigned order) const {
        return fmaxf(fmaf(score_of(order) - least, per_score, FIRST + 1), FIRST);
    }

    __device__ __forceinline__ static unsigned index(float bin) {
        return __float_as_uint(bin) - __float_as_uint(FIRST);
    }
};

// The orders of a warp's range of entries: a lane has four consecutive ones of every strip. Those
// that do not exist are LOWEST, like those that must not be selected.
struct Held {
    unsigned orders[HELD];
    int first, strips;  // the lane's first entry, and how many strips the warp has

    __device__ __forceinline__ void load(const Source& source) {
        first = source.first + LANE_ENTRIES * (threadIdx.x % WARP);
        strips = (source.count + STRIP - 1) / STRIP;
        const uint4* const from = reinterpret_cast<const uint4*>(source.orders + first);
        const int end = source.first + source.count;
#pragma unroll
        for (int i = 0; i < STRIPS; ++i) {
            uint4 four = make_uint4(0, 0, 0, 0);
            if (first + STRIP * i < end) four = __ldcg(from + WARP * i);
            unsigned* const to = orders + LANE_ENTRIES * i;
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        }
        if (source.count % STRIP == 0) return;
        for_each([&](unsigned& order, int place) {
            if (entry(place) >= end) order = LOWEST;
        });
    }

    __device__ __forceinline__ int entry(int place) const {
        return first + STRIP * (place / LANE_ENTRIES) + place % LANE_ENTRIES;
    }

    // Of a place that is not known when this is compiled.
    __device__ __forceinline__ uint64 value(int place) const {
        unsigned order = LOWEST;
#pragma unroll
        for (int i = 0; i < HELD; ++i) order = place == i ? orders[i] : order;
        return value_of(order, entry(place));
    }

    // Calls body(order, place) of all that the warp has.
    template <class Body>
    __device__ __forceinline__ void for_each(Body body) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (i / LANE_ENTRIES >= strips) break;
            body(orders[i], i);
        }
    }
};

// Bins between the least and the largest order of the token.
__device__ __forceinline__ EqualBins bins_of(Held& held, Shared& shared, bool spread) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // Orders that must not be selected become the largest ones.
    unsigned least = ~0u, largest = 0;
    held.for_each([&](unsigned order, int) {
        least = min(least, order - (LOWEST + 1)), largest = max(largest, order);
    });
    least = __reduce_min_sync(~0u, least), largest = __reduce_max_sync(~0u, largest);
    if (lane == 0) shared.scan[warp] = least, shared.counts[warp] = largest;
    __syncthreads();
    least = __reduce_min_sync(~0u, lane < WARPS ? shared.scan[lane] : ~0u);
    largest = __reduce_max_sync(~0u, lane < WARPS ? shared.counts[lane] : 0);
    if (spread) {
        uint2* const own = &shared.ends[own_rank()];
        if (lane == 0 && warp < CLUSTER) {
            remote_store(&own->x, warp, least);
            remote_store(&own->y, warp, largest);
        }
        cluster_arrive();
        cluster_wait();
        least = __reduce_min_sync(~0u, lane < CLUSTER ? shared.ends[lane].x : ~0u);
        largest = __reduce_max_sync(~0u, lane < CLUSTER ? shared.ends[lane].y : 0);
    }
    return EqualBins(least + (LOWEST + 1), largest);
}

// Writes the entries of `chosen`, a bit for each place, behind those of the warps before, the
// first one to `list`.
__device__ __forceinline__ void list_held(Held& held, unsigned chosen, int64* list,
                                          Shared& shared) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // Four strips have a byte each: of this lane, up to here, and of the warp.
    constexpr int GROUPS = STRIPS / 4;
    unsigned own[GROUPS] = {}, until[GROUPS], all[GROUPS];
#pragma unroll
    for (int i = 0; i < STRIPS; ++i)
        own[i / 4] |= __popc(chosen >> LANE_ENTRIES * i & 15) << i % 4 * 8;
    const unsigned total = __reduce_add_sync(~0u, __popc(chosen));
    if (lane == 0) shared.counts[warp] = total;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        until[group] = own[group];
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            const unsigned before = __shfl_up_sync(~0u, until[group], offset);
            if (lane >= offset) until[group] += before;
        }
        all[group] = __shfl_sync(~0u, until[group], WARP - 1);
    }
    __syncthreads();
    list += __reduce_add_sync(~0u, lane < warp ? shared.counts[lane] : 0);
    int64* to = list;
    held.for_each([&](unsigned, int place) {
        const int group = place / 16, shift = place / LANE_ENTRIES % 4 * 8;
        if (place % LANE_ENTRIES == 0) {
            to = list + ((until[group] - own[group]) >> shift & 255);
            list += all[group] >> shift & 255;
        }
        if (chosen >> place & 1) *to++ = held.entry(place);
    });
}

// Whether the best `selected` of the `visible` orders of a token have been listed. Otherwise all is
// as before.
__device__ __forceinline__ bool select_held(Shared& shared, const unsigned* orders, int visible,
                                            int64* list, int selected, bool spread) {
    const Share share(visible, spread);
    Held held;
    held.load(share.source(orders));
    if (spread) cluster_wait();
    const EqualBins bins = bins_of(held, shared, spread);
    unsigned* const counts = shared.bins[0];
    float bin[HELD];
    if (bins.are_usable()) {
        held.for_each([&](unsigned order, int place) {
            bin[place] = bins.bin(order);
            atomicAdd(&counts[EqualBins::index(bin[place])], 1u);
        });
        __syncthreads();
        find_bin(shared, merge_bins(shared, counts, SETS - 1, spread), selected);
    }
    const unsigned inside = shared.bin_count, wanted = shared.wanted;
    if (!bins.are_usable() || inside == 0 || inside > FEW || shared.bin == 0) {
        for (int i = threadIdx.x; i < BINS; i += THREADS) counts[i] = 0;
        __syncthreads();
        if (spread) cluster_arrive();
        return false;
    }
    const float last = EqualBins::FIRST + shared.bin;
    unsigned chosen = 0, few = 0;
    held.for_each([&](unsigned, int place) {
        if (bin[place] > last) chosen |= 1u << place;
        if (bin[place] == last) few |= 1u << place;
    });
    if (inside == wanted) chosen |= few, few = 0;
    for (unsigned rest = few; rest; rest &= rest - 1)
        put_few(shared, held.value(__ffs(rest) - 1), spread);
    meet(shared, __popc(chosen), spread);
    if (spread) list += shared.above_before;
    if (inside > wanted) {
        rank_few(shared, inside, wanted);
        for (unsigned rest = few; rest; rest &= rest - 1) {
            const int place = __ffs(rest) - 1;
            if (held.value(place) >= shared.least) chosen |= 1u << place;
        }
        if (spread) list += few_before(shared, inside, share.block_first);
    }
    list_held(held, chosen, list, shared);
    return true;
}

// Selects from the `visible` orders of a token, with all blocks of the cluster (`spread`) or with
// this one alone. `orders` is aligned to 16 bytes. The blocks of a cluster have arrived at its
// barrier after clear(), and not waited yet.
__device__ __forceinline__ void select(Shared& shared, const unsigned* orders, int visible,
                                       int64* list, int selected, bool spread) {
    const int most = HELD * THREADS * (spread ? CLUSTER : 1);
    if (visible <= most && select_held(shared, orders, visible, list, selected, spread)) return;
    select_any(shared, orders, visible, list, selected, spread);
}

}  // namespace top_k
