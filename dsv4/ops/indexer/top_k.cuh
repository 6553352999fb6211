// The `selected` best entries of a token, from the orders that index_scores wrote: exact,
// ascending, the lowest entry first among equals, -1 where fewer can be selected.
//
// Here for any number of orders with any values, and what top_k_held.cuh, the usual way, shares
// with it. Entries are compared by their value: the order above the complement of the entry, so
// that no two are equal. A radix selection of 11 bits at a time narrows the interval that holds the
// last selected value until it holds few, which are then ranked one by one. CLUSTER blocks of
// THREADS threads work on a token, or one of them. Every warp owns a contiguous range of entries:
// it reads them with STRIPS loads in a row, and after the first digit keeps those that can still be
// selected in shared memory if they are no more than KEPT.
#pragma once
#include "cluster.cuh"
#include "index_order.cuh"

namespace top_k {

using uint64 = unsigned long long;

constexpr int WARPS = THREADS / WARP;
constexpr int BINS = 2048;
constexpr int SHARE = CLUSTER > 1 ? BINS / CLUSTER : 1;
constexpr int BINS_PER_THREAD = BINS / THREADS;
constexpr int DIGITS = 6;
constexpr int SETS = DIGITS + 2;  // of counts that a cluster adds up
constexpr int DIGIT_BITS = 11;
constexpr int VALUE_BITS = 64;
// A warp loads a strip of entries at once, AHEAD strips in a row.
constexpr int LANE_ENTRIES = 4;
constexpr int STRIP = WARP * LANE_ENTRIES;
constexpr int AHEAD = STRIPS;
constexpr int FEW = 128;  // values that are ranked against each other
constexpr int MANY = 12;  // entries of a lane from which on most are dropped before counting

struct Shared {
    unsigned bins[2][BINS];  // this block's counts of the current digit; the other half is zero
    unsigned share[SETS][SHARE];        // the cluster's counts of this block's share of the bins
    unsigned total[CLUSTER > 1 ? BINS : 1];  // the cluster's counts
    uint64 few[FEW];                         // the values of the last bin
    unsigned ranks[FEW];
    uint64 least;
    uint2 ends[CLUSTER];  // of each block the least and the largest order
    unsigned few_count, above, above_before;
    unsigned counts[WARPS], scan[WARPS];
    unsigned bin, wanted, bin_count;
    unsigned order[WARPS][KEPT];
    int entry[WARPS][KEPT];
};

// This block's place in its cluster.
__device__ __forceinline__ unsigned own_rank() { return CLUSTER > 1 ? cluster_rank() : 0; }

__device__ __forceinline__ void remote_add(unsigned* shared, unsigned rank, unsigned value) {
    asm volatile(
        "red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(remote_address(shared, rank)),
        "r"(value)
        : "memory");
}

__device__ __forceinline__ unsigned remote_increment(unsigned* shared, unsigned rank) {
    unsigned before;
    asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "r"(remote_address(shared, rank))
                 : "memory");
    return before;
}

__device__ __forceinline__ void remote_store(unsigned* shared, unsigned rank, unsigned value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote_address(shared, rank)), "r"(value)
                 : "memory");
}

__device__ __forceinline__ uint64 value_of(unsigned order, int entry) {
    return (uint64)order << 32 | ~(unsigned)entry;
}

// The entries one warp looks at: a range of the token's row, or what it kept of it.
struct Source {
    const unsigned* orders;
    int first, count;
    bool kept;
};

// The entries of a token that a warp looks at: `range` of them where there are so many.
struct Share {
    int range, first, count, block_first;

    __device__ __forceinline__ Share(int visible, bool spread) {
        const int strips = (spread ? CLUSTER : 1) * WARPS * STRIP;
        const int block_warp = spread ? (int)own_rank() * WARPS : 0;
        range = (visible + strips - 1) / strips * STRIP;
        block_first = min(block_warp * range, visible);
        first = min((block_warp + (int)threadIdx.x / WARP) * range, visible);
        count = min(range, visible - first);
    }

    __device__ __forceinline__ Source source(const unsigned* orders) const {
        return {orders, first, count, false};
    }
};

__device__ __forceinline__ uint4 load_orders(const Source& source, int at) {
    return at < source.count
               ? __ldcg(reinterpret_cast<const uint4*>(source.orders + source.first + at))
               : make_uint4(0, 0, 0, 0);
}

// Calls body(orders, entry, valid) with four consecutive orders per lane, of which the first
// `valid` exist.
template <class Body>
__device__ __forceinline__ void for_each_strip(const Source& source, Body body) {
    const int lane = threadIdx.x % WARP;
    const auto visit = [&](const uint4& orders, int start) {
        const unsigned found[LANE_ENTRIES] = {orders.x, orders.y, orders.z, orders.w};
        const int at = start + LANE_ENTRIES * lane;
        body(found, source.first + at, min(max(source.count - at, 0), LANE_ENTRIES));
    };
    for (int start = 0; start < source.count; start += STRIP * AHEAD) {
        uint4 orders[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            orders[i] = load_orders(source, start + STRIP * i + LANE_ENTRIES * lane);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (start + STRIP * i >= source.count) break;
            visit(orders[i], start + STRIP * i);
        }
    }
}

// Calls body(value, valid) with all lanes. Entries that must not be selected are not valid.
template <class Body>
__device__ __forceinline__ void for_each(const Source& source, const Shared& shared, Body body) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (!source.kept) {
        for_each_strip(source, [&](const unsigned (&orders)[LANE_ENTRIES], int entry, int valid) {
#pragma unroll
            for (int i = 0; i < LANE_ENTRIES; ++i)
                body(value_of(orders[i], entry + i), i < valid && orders[i] > LOWEST);
        });
        return;
    }
    for (int i = lane; i - lane < source.count; i += WARP) {
        const bool valid = i < source.count;
        body(valid ? value_of(shared.order[warp][i], shared.entry[warp][i]) : 0, valid);
    }
}

// Calls put(place, order, entry) for the warp's entries of at least `least`, places counting up
// from 0 in the order of entries; returns their number. For a source that is not kept.
template <class Put>
__device__ __forceinline__ int place_each(const Source& source, uint64 least, Put put) {
    const unsigned below = (1u << threadIdx.x % WARP) - 1;
    int count = 0;
    for_each_strip(source, [&](const unsigned (&orders)[LANE_ENTRIES], int entry, int valid) {
        bool wanted[LANE_ENTRIES];
        int mine = 0;
#pragma unroll
        for (int i = 0; i < LANE_ENTRIES; ++i) {
            wanted[i] = i < valid && orders[i] > LOWEST && value_of(orders[i], entry + i) >= least;
            mine += wanted[i];
        }
        const unsigned ones = __ballot_sync(~0u, mine & 1);
        const unsigned twos = __ballot_sync(~0u, mine & 2);
        const unsigned fours = __ballot_sync(~0u, mine & 4);
        int at =
            count + __popc(ones & below) + 2 * __popc(twos & below) + 4 * __popc(fours & below);
        count += __popc(ones) + 2 * __popc(twos) + 4 * __popc(fours);
#pragma unroll
        for (int i = 0; i < LANE_ENTRIES; ++i) {
            if (wanted[i]) put(at++, orders[i], entry + i);
        }
    });
    return count;
}

// Moves the entries of at least `least` to shared memory, in order; leaves the source as it is when
// they do not fit.
__device__ __forceinline__ void keep(Source& source, Shared& shared, uint64 least) {
    if (source.kept) return;
    const int warp = threadIdx.x / WARP;
    const int count = place_each(source, least, [&](int place, unsigned order, int entry) {
        if (place < KEPT) shared.order[warp][place] = order, shared.entry[warp][place] = entry;
    });
    __syncwarp();
    if (count <= KEPT) source.kept = true, source.count = count;
}

// Sum of `value` over the threads before this one.
__device__ __forceinline__ unsigned block_prefix(unsigned value, unsigned* scan) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    unsigned sum = value;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const unsigned before = __shfl_up_sync(~0u, sum, offset);
        if (lane >= offset) sum += before;
    }
    if (lane == WARP - 1) scan[warp] = sum;
    __syncthreads();
    const unsigned other = lane < warp ? scan[lane] : 0;
    return __reduce_add_sync(~0u, other) + sum - value;
}

// Finds the bin that holds the wanted-th largest value: shared.bin, shared.wanted (its rank in the
// bin), shared.bin_count. With fewer values than that, bin_count is 0.
__device__ __forceinline__ void find_bin(Shared& shared, const unsigned* counts, unsigned wanted) {
    // Threads take bins from the top.
    const int top = BINS - 1 - BINS_PER_THREAD * (int)threadIdx.x;
    unsigned count[BINS_PER_THREAD], sum = 0;
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; ++i) count[i] = counts[top - i], sum += count[i];
    unsigned before = block_prefix(sum, shared.scan);
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; ++i) {
        if (before < wanted && wanted <= before + count[i]) {
            shared.bin = top - i, shared.wanted = wanted - before, shared.bin_count = count[i];
        }
        before += count[i];
    }
    if (threadIdx.x == THREADS - 1 && before < wanted) shared.bin_count = 0;
    __syncthreads();
}

// Adds up the blocks' counts: each block sums its share of the bins, then sends it to all. A `set`
// is used once.
__device__ __forceinline__ const unsigned* merge_bins(Shared& shared, const unsigned* bins,
                                                      int set, bool spread) {
    if (!spread) return bins;
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        if (bins[bin]) remote_add(&shared.share[set][bin % SHARE], bin / SHARE, bins[bin]);
    }
    cluster_arrive();
    cluster_wait();
    const unsigned own = own_rank();
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        remote_store(&shared.total[own * SHARE + i % SHARE], i / SHARE,
                     shared.share[set][i % SHARE]);
    }
    cluster_arrive();
    cluster_wait();
    return shared.total;
}

// The interval [low, low + size) of values that holds the wanted-th largest of them, and how many
// it holds.
struct Interval {
    uint64 low;
    int bits;  // size is 2^bits
    unsigned wanted, count;

    __device__ __forceinline__ bool holds(uint64 value) const {
        return value >> bits == low >> bits;
    }
    __device__ __forceinline__ bool exceeded_by(uint64 value) const {
        return value >> bits > low >> bits;
    }
};

// Drops what is below a lower bound of the last selected value: that many threads' largest values
// are at least as large.
__device__ __forceinline__ void drop_most(Shared& shared, Source& source, int selected,
                                          bool spread) {
    unsigned* bins = shared.bins[1];
    unsigned largest = 0;
    for_each_strip(source, [&](const unsigned (&orders)[LANE_ENTRIES], int, int valid) {
#pragma unroll
        for (int i = 0; i < LANE_ENTRIES; ++i) largest = max(largest, i < valid ? orders[i] : 0u);
    });
    if (largest > LOWEST) atomicAdd(&bins[largest >> (32 - DIGIT_BITS)], 1u);
    __syncthreads();
    find_bin(shared, merge_bins(shared, bins, DIGITS, spread), selected);
    if (shared.bin_count > 0) keep(source, shared, (uint64)shared.bin << (VALUE_BITS - DIGIT_BITS));
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) bins[bin] = 0;
}

// Narrows the interval until all of it is selected or few values are left; keeps what is not below
// it.
__device__ __forceinline__ Interval narrow(Shared& shared, Source& source, int range, int selected,
                                           bool spread) {
    Interval interval{0, VALUE_BITS, (unsigned)selected, 0};
    if (spread) cluster_wait();
    // Counting every entry costs an atomic each; with many entries a thread, its largest alone says
    // nearly as much.
    if (range >= MANY * WARP && selected <= (spread ? CLUSTER * THREADS : THREADS) / 2)
        drop_most(shared, source, selected, spread);
    for (int digit = 0; digit < DIGITS; ++digit) {
        const int bits = max(interval.bits - DIGIT_BITS, 0);
        const int width = interval.bits - bits;
        unsigned* bins = shared.bins[digit % 2];
        for_each(source, shared, [&](uint64 value, bool valid) {
            if (valid && (digit == 0 || interval.holds(value)))
                // counts = digit(value_S).bincount(minlength=BINS)
                atomicAdd(&bins[value >> bits & ((1u << width) - 1)], 1u);
        });
        __syncthreads();
        find_bin(shared, merge_bins(shared, bins, digit, spread), interval.wanted);
        interval.count = shared.bin_count;
        if (interval.count == 0) {
            // Fewer than `selected` may be selected: all of them are.
            interval.low = (uint64)(LOWEST + 1) << 32, interval.bits = 32, interval.wanted = 0;
        } else {
            interval.low |= (uint64)shared.bin << bits;
            interval.bits = bits;
            interval.wanted = shared.wanted;
        }
        keep(source, shared, interval.low);
        if (interval.count <= FEW || interval.count == interval.wanted) break;
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) bins[bin] = 0;
    }
    return interval;
}

// Adds one to the few of the last bin, or of the interval. Every block gets every member, in the
// same place.
__device__ __forceinline__ void put_few(Shared& shared, uint64 value, bool spread) {
    if (!spread) {
        shared.few[atomicAdd(&shared.few_count, 1u)] = value;
        return;
    }
    const unsigned place = remote_increment(&shared.few_count, 0);
    for (int block = 0; block < CLUSTER; ++block) {
        unsigned* halves = reinterpret_cast<unsigned*>(&shared.few[place]);
        remote_store(halves, block, (unsigned)value);
        remote_store(halves + 1, block, value >> 32);
    }
}

// Behind put_few: all of the few are there, and if spread also shared.above_before, with `above` of
// all threads of the blocks before this one.
__device__ __forceinline__ void meet(Shared& shared, unsigned above, bool spread) {
    if (!spread) return __syncthreads();
    above = __reduce_add_sync(~0u, above);
    if (threadIdx.x % WARP == 0 && above) atomicAdd(&shared.above, above);
    __syncthreads();
    if (threadIdx.x < CLUSTER && threadIdx.x > own_rank())
        remote_add(&shared.above_before, threadIdx.x, shared.above);
    cluster_arrive();
    cluster_wait();
}

// The least selected value, in shared.least: that of rank `wanted` among `count` few.
__device__ __forceinline__ void rank_few(Shared& shared, int count, unsigned wanted) {
    // Thread (part, member) compares one member with a share of the others.
    const int member = threadIdx.x % FEW;
    const int part = threadIdx.x / FEW;
    if (member < count) {
        unsigned greater = 0;
        for (int other = part; other < count; other += THREADS / FEW)
            greater += shared.few[other] > shared.few[member];
        if (greater) atomicAdd(&shared.ranks[member], greater);
    }
    __syncthreads();
    if (threadIdx.x < count && shared.ranks[threadIdx.x] == wanted - 1)
        shared.least = shared.few[threadIdx.x];
    __syncthreads();
}

// How many of the `count` few are selected and lie before `entry`.
__device__ __forceinline__ int few_before(const Shared& shared, int count, int entry) {
    int before = 0;
    for (int i = threadIdx.x % WARP; i < count; i += WARP)
        before += shared.few[i] >= shared.least && (int)~(unsigned)shared.few[i] < entry;
    return __reduce_add_sync(~0u, before);
}

// Sets shared.least, and returns how many selected entries belong to blocks before this one.
__device__ __forceinline__ int find_least(Shared& shared, const Source& source,
                                          const Interval& interval, bool spread, int block_first) {
    const bool whole = interval.count == interval.wanted;
    if (!spread && whole) {
        if (threadIdx.x == 0) shared.least = interval.low;
        __syncthreads();
        return 0;
    }
    unsigned above = 0;
    for_each(source, shared, [&](uint64 value, bool valid) {
        above += valid && (interval.exceeded_by(value) || (whole && interval.holds(value)));
        if (valid && !whole && interval.holds(value)) put_few(shared, value, spread);
    });
    meet(shared, above, spread);
    if (whole) {
        if (threadIdx.x == 0) shared.least = interval.low;
        __syncthreads();
        return shared.above_before;
    }
    rank_few(shared, interval.count, interval.wanted);
    return spread ? shared.above_before + few_before(shared, interval.count, block_first) : 0;
}

// Before anything else of this file: sets the counters; the caller's barrier makes them visible.
__device__ __forceinline__ void clear(Shared& shared) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS)
        shared.bins[0][bin] = shared.bins[1][bin] = 0;
    if (CLUSTER > 1) {
        for (int set = 0; set < SETS; ++set) {
            for (int bin = threadIdx.x; bin < SHARE; bin += THREADS) shared.share[set][bin] = 0;
        }
    }
    if (threadIdx.x < FEW) shared.ranks[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.few_count = shared.above = shared.above_before = 0;
}

// A token that sees no more than `selected` entries gets all of them. By `blocks` blocks, of which
// this is `rank`.
__device__ __forceinline__ void list_all(int64* list, int visible, int selected, int rank,
                                         int blocks) {
    for (int i = rank * THREADS + threadIdx.x; i < selected; i += blocks * THREADS)
        list[i] = i < visible ? i : -1;
}

// select() of top_k_held.cuh, without condition.
__device__ __forceinline__ void select_any(Shared& shared, const unsigned* orders, int visible,
                                           int64* list, int selected, bool spread) {
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const Share share(visible, spread);
    Source source = share.source(orders);
    // least = value_S.topk(selected).values[-1]: first an interval that holds it, then itself
    const Interval interval = narrow(shared, source, share.range, selected, spread);
    int before = find_least(shared, source, interval, spread, share.block_first);
    // list = (value_S >= least).nonzero(), every warp behind those before it
    const uint64 least = shared.least;
    int count = 0;
    for_each(source, shared, [&](uint64 value, bool valid) { count += valid && value >= least; });
    count = __reduce_add_sync(~0u, count);
    if (lane == 0) shared.counts[warp] = count;
    __syncthreads();
    before += __reduce_add_sync(~0u, lane < warp ? shared.counts[lane] : 0);
    if (source.kept) {
        const unsigned below = (1u << lane) - 1;
        for_each(source, shared, [&](uint64 value, bool valid) {
            const bool mine = valid && value >= least;
            const unsigned all = __ballot_sync(~0u, mine);
            if (mine) list[before + __popc(all & below)] = (int)~(unsigned)value;
            before += __popc(all);
        });
    } else {
        before += place_each(source, least,
                             [&](int place, unsigned, int entry) { list[before + place] = entry; });
    }
    // list = F.pad(list, (0, selected - len(list)), value=-1)
    if (own_rank() == (spread ? CLUSTER - 1 : 0) && warp == WARPS - 1) {
        for (int i = before + lane; i < selected; i += WARP) list[i] = -1;
    }
}

}  // namespace top_k
