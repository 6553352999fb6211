// Sums over the ranks of tensor parallelism: a producing kernel pushes float32 words into the inbox
// of every rank, its own included, and the kernel that needs the sum polls its own inbox. Every
// rank adds the same words in the order of the ranks, so all of them hold the same bits.
//
// A word is {tag, value} in 64 bits, written and read by single relaxed accesses: it says itself
// which exchange of which step it belongs to. So there is no fence, no flag and no reset, and any
// value is legal. Words of other steps do not match, whatever was interrupted.
//
// A kernel pushes or polls for an exchange, never both: queued behind the producers of all ranks,
// consumers also run where all ranks share one stream.
//
// Defines: RANKS; OWNERS (token_share.cuh); STAMPS, for measurements.
// `peers`, of every rank for itself (dsv4/peers.py): the addresses of all inboxes, of its own one,
// of its step counter, of the words for the host about a fault, and in prefill steps of the partial
// results of all ranks, of the inputs of their sublayers and of the entries that they chose.
#pragma once
#include "ptx.cuh"
#include "token_share.cuh"
#include "words.cuh"

#ifndef RANKS
#define RANKS 1
#endif

constexpr int OWN_INBOX = RANKS, STEP = RANKS + 1, FAULT = RANKS + 2, PARTIALS = RANKS + 3;
constexpr int INPUTS = PARTIALS + RANKS, CHOSEN = INPUTS + RANKS, STAMPED = CHOSEN + RANKS;
constexpr int EXCHANGES_PER_STEP = 256;

// `step`: the address of the rank's step counter.
__device__ __forceinline__ unsigned exchange_tag(int64 step, int exchange) {
    unsigned number;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(number) : "l"(step));
    return number * EXCHANGES_PER_STEP + exchange;
}

// Of the last STAMPS exchanges, when this rank pushed its last word and found its last word, by
// this GPU's clock in nanoseconds (dsv4/parallel/stamps.py). One word in 16 says so. Other builds
// have nothing of it.
enum Moment { PUSHED, FOUND, MOMENTS };

struct Stamps {
#ifdef STAMPS
    int64 first;

    __device__ __forceinline__ void open(int64 address) { first = address; }

    __device__ __forceinline__ void note(Moment moment, unsigned tag, int64 index) const {
        if (index % 16) return;
        unsigned long long now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
        atomicMax(reinterpret_cast<unsigned long long*>(first) + tag % STAMPS * MOMENTS + moment,
                  now);
    }
#else
    __device__ __forceinline__ void open(int64) {}
    __device__ __forceinline__ void note(Moment, unsigned, int64) const {}
#endif
};

// Where a kernel pushes, in shared memory. `slot`: the rank's first word in every inbox.
struct Outbox {
    int64 first[RANKS];
    unsigned tag;
    Stamps stamps;

    // The first lanes of one warp, behind pdl_wait.
    __device__ __forceinline__ void open(const int64* peers, int64 slot, int exchange) {
        const int lane = threadIdx.x % WARP;
        if (lane < RANKS) first[lane] = peers[lane] + 8 * slot;
        if (lane == 0) {
            tag = exchange_tag(peers[STEP], exchange);
#ifdef STAMPS
            stamps.open(peers[STAMPED]);
#endif
        }
    }

    __device__ __forceinline__ void push(int64 index, float value) const {
        const word64 word = make_word(tag, __float_as_uint(value));
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) store_word(first[rank] + 8 * index, word);
        stamps.note(PUSHED, tag, index);
    }
};

// Where an inbox and what belongs to it lie. Of one rank nothing is read.
struct InboxAddress {
    int64 inbox = 0, step = 0, fault = 0, stamps = 0;

    InboxAddress() = default;

    // Constants only: before pdl_wait, so that words are asked for without a trip before.
    __device__ __forceinline__ explicit InboxAddress(const int64* peers) {
        if constexpr (RANKS > 1) {
            inbox = fetch_address(peers + OWN_INBOX);
            step = fetch_address(peers + STEP);
            fault = fetch_address(peers + FAULT);
#ifdef STAMPS
            stamps = fetch_address(peers + STAMPED);
#endif
        }
    }

    // Where the program says: the compiler moves other loads of constants behind pdl_wait.
    __device__ __forceinline__ static int64 fetch_address(const int64* from) {
        int64 address;
        asm volatile("ld.global.nc.u64 %0, [%1];" : "=l"(address) : "l"(from));
        return address;
    }
};

// What a kernel polls: words [RANKS][rank_words] from `slot` on.
struct Inbox {
    const char* first = nullptr;
    int64 rank_bytes = 0;
    int* fault = nullptr;
    unsigned tag = 0;
    int exchange = 0;
    Stamps stamps;

    Inbox() = default;

    // When the number of the step is complete: behind pdl_wait, or where it is settled.
    __device__ __forceinline__ Inbox(const InboxAddress& at, int64 slot, int64 rank_words,
                                     int number) {
        if constexpr (RANKS > 1) {
            first = reinterpret_cast<const char*>(at.inbox + 8 * slot);
            rank_bytes = 8 * rank_words;
            fault = reinterpret_cast<int*>(at.fault);
            tag = exchange_tag(at.step, number);
            exchange = number;
            stamps.open(at.stamps);
        }
    }

    // One look at Count words of a rank; false: they have not all come.
    template <int Count>
    __device__ __forceinline__ bool look(const char* from, float (&values)[Count]) const {
        unsigned words[Count][2];
        if constexpr (Count == 1) {
            const word64 word = load_word(from);
            words[0][0] = unsigned(word), words[0][1] = tag_of(word);
        } else {
            // A 64-bit word is one access, whatever the vector's width.
#pragma unroll
            for (int i = 0; i < Count; i += 2) {
                unsigned long long low, high;
                asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                             : "=l"(low), "=l"(high)
                             : "l"(from + 8 * i)
                             : "memory");
                words[i][0] = unsigned(low), words[i][1] = unsigned(low >> 32);
                words[i + 1][0] = unsigned(high), words[i + 1][1] = unsigned(high >> 32);
            }
        }
        bool here = true;
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            here = here && words[i][1] == tag;
            values[i] = __uint_as_float(words[i][0]);
        }
        return here;
    }

    // Count words of each of several places, `stride` bytes apart, when all have come.
    // sender(place): the rank that they come from.
    template <int Places, int Count, typename Sender>
    __device__ __forceinline__ void find_all(const char* from, int64 stride,
                                             float (&values)[Places][Count], Sender sender) const {
        bool here[Places];
        bool all = true;
#pragma unroll
        for (int place = 0; place < Places; ++place) {
            here[place] = look(from + place * stride, values[place]);
            all = all && here[place];
        }
        if (all) return;
        const long long end = clock64() + WAIT_CYCLES;
        do {
            all = true;
#pragma unroll
            for (int place = 0; place < Places; ++place) {
                if (!here[place]) here[place] = look(from + place * stride, values[place]);
                all = all && here[place];
            }
            if (!all && clock64() > end) {
#pragma unroll
                for (int place = 0; place < Places; ++place)
                    if (!here[place])
                        give_up_waiting(fault, exchange, sender(place), tag / EXCHANGES_PER_STEP);
            }
        } while (!all);
    }

    // Count words of `rank` in each of Places rows, `row_words` apart, from `index` on.
    template <int Places, int Count>
    __device__ __forceinline__ void find(int64 index, int rank, int row_words,
                                         float (&values)[Places][Count]) const {
        find_all(first + rank * rank_bytes + 8 * index, 8 * row_words, values,
                 [&](int) { return rank; });
        stamps.note(FOUND, tag, index);
    }

    // One word of `rank`.
    __device__ __forceinline__ float find(int64 index, int rank) const {
        float value[1][1];
        find(index, rank, 0, value);
        return value[0][0];
    }

    // sums = values of rank 0 + those of rank 1 + …, of Count words from `index` on.
    template <int Count>
    __device__ __forceinline__ void sum(int64 index, float (&sums)[Count]) const {
        float values[RANKS][Count];
        find_all(first + 8 * index, rank_bytes, values, [](int rank) { return rank; });
        stamps.note(FOUND, tag, index);
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            sums[i] = values[0][i];
#pragma unroll
            for (int rank = 1; rank < RANKS; ++rank) sums[i] += values[rank][i];
        }
    }
};
