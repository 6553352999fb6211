// The keys of a block of attention_decode: which they are, and how their rows come into shared
// memory.
#pragma once
#include "attention_decode_block.cuh"

// a / b for a non-negative a, in 32 bits where they suffice.
__device__ __forceinline__ int64 divide(int64 a, int b) {
    return (a >> 32) == 0 ? (int64)((unsigned)a / (unsigned)b) : a / b;
}

// The j-th key of block `rank` of `ranks` among all: blocks take turns of four, so that they share
// any prefix evenly.
__device__ __forceinline__ int turn_of(int j, int rank, int ranks) {
    return ((j >> 2) * ranks + rank) * 4 + (j & 3);
}

// The most of `keys` keys that one block of the cluster can have.
__device__ __forceinline__ int most_turns(int keys) {
    return ((keys + 3) / 4 + CLUSTER - 1) / CLUSTER * 4;
}

// Waits for rows until PENDING groups of copies are left.
template <int PENDING>
__device__ __forceinline__ void rows_wait() {
    cp_async_wait<PENDING>();
    __syncthreads();
}

struct Keys {
    const unsigned char *ring, *ring_scale, *entries, *entry_scale;
    int ring_slots;
    int* list;                    // this block's with LISTED: ring slots as ~slot, entries as are
    int rank, ranks;              // this block among those that share the keys
    int first_slot, window_keys;  // first_slot: slot of the oldest token in the window
    int new_window, new_entries;  // the first keys of either kind that this step writes
    int all, count;               // keys of the token (without LISTED), and of this block

    __device__ __forceinline__ void see(int64 position, int window) {
        window_keys = (int)min(position + 1, (int64)window);
        const int64 oldest = position + 1 - window_keys;
        first_slot = (int)(oldest - divide(oldest, ring_slots) * ring_slots);
    }

    // The step has stored the window rows of the `tokens` tokens up to this position, and the
    // entries that they complete. `complete`: entries of `ratio` tokens that are there.
    __device__ __forceinline__ void see_new(int64 position, int tokens, int ratio, int complete) {
        new_window = max(window_keys - tokens, 0);
        const int64 start = max(position + 1 - tokens, 0ll);
        new_entries = window_keys + (int)min(divide(start, ratio), (int64)complete);
    }

    __device__ __forceinline__ bool is_new(int key) const {
        return key < window_keys ? key >= new_window : key >= new_entries;
    }

    // How many of all keys are this block's, when blocks take turns of four.
    __device__ __forceinline__ int share() const {
        const int rounds = all / (4 * ranks);
        return 4 * rounds + min(max(all - (rounds * ranks + rank) * 4, 0), 4);
    }

    // Lists this block's keys, without those that do not exist, in their order: as without a list
    // where that holds every entry. `slots` of the entries; `first_selected`: what a full window
    // leaves this thread to look up first.
    __device__ __forceinline__ void find(const int64* selected, int listed, int window, int slots,
                                         int64 first_selected, Shared& shared) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const int turns = most_turns(window + listed);
        count = 0;
        for (int base = 0; base < turns; base += THREADS) {
            const int j = base + threadIdx.x;
            const int key = turn_of(j, rank, CLUSTER);
            int code = 0;
            bool seen = false;
            const int at_list = key - window_keys;
            if (j < turns && at_list < 0) {
                int slot = first_slot + key;
                if (slot >= ring_slots) slot -= ring_slots;
                seen = true;
                code = ~slot;
            } else if (j < turns && at_list < listed) {
                const bool is_there = base == 0 && window_keys == window;
                const int64 entry = is_there ? first_selected : selected[at_list];
                seen = entry >= 0 && entry < slots;
                code = (int)entry;
            }
            const unsigned votes = __ballot_sync(~0u, seen);
            if (base > 0) __syncthreads();
            if (lane == 0) shared.counts[warp] = __popc(votes);
            __syncthreads();
            int at = count + __popc(votes & ((1u << lane) - 1));
#pragma unroll
            for (int other = 0; other < WARPS; ++other) {
                if (other < warp) at += shared.counts[other];
                count += shared.counts[other];
            }
            if (seen) list[at] = code;
        }
        __syncthreads();
    }

    // Row and scale address of key j of this block.
    __device__ __forceinline__ void address(int j, const unsigned char*& row,
                                            const unsigned char*& scale) const {
        bool in_ring;
        int slot;
        if constexpr (LISTED) {
            const int code = list[j];
            in_ring = code < 0;
            slot = in_ring ? ~code : code;
        } else {
            const int key = turn_of(j, rank, ranks);
            in_ring = key < window_keys;
            slot = key + (in_ring ? first_slot : -window_keys);
            if (in_ring && slot >= ring_slots) slot -= ring_slots;
        }
        row = (in_ring ? ring : entries) + (int64)slot * ROW_BYTES;
        if constexpr (FP8)
            scale = (in_ring ? ring_scale : entry_scale) + (int64)slot * SCALE_BYTES;
    }

    // Starts copying keys first .. first + rows - 1 into a stage, but for those that this step
    // writes if OLD; zeros up to a multiple of 16 rows. A warp takes 8 rows at a time, 512 bytes of
    // one row with each copy.
    template <bool OLD>
    __device__ __forceinline__ void gather(unsigned char* stage, int first, int rows) const {
        const int padded = (rows + 15) & ~15;
        const int lane = threadIdx.x % WARP;
        const int part = lane % 4;
        for (int r = threadIdx.x / WARP * 8; r < padded; r += WARPS * 8) {
            const int mine = r + lane / 4;
            const unsigned char *row, *scale;
            address(first + (mine < rows ? mine : 0), row, scale);
            const bool left_out = OLD && mine < rows && is_new(turn_of(first + mine, rank, ranks));
            const unsigned gaps = OLD ? __ballot_sync(~0u, left_out) : 0;
            const unsigned to = shared_address(stage) + r * PITCH;
#pragma unroll 4
            for (int i = 0; i < 8; ++i) {
                if (OLD && (gaps >> 4 * i & 1)) continue;
                const unsigned char* from = reinterpret_cast<const unsigned char*>(
                    __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), 4 * i));
#pragma unroll
                for (int half = 0; half < ROW_BYTES / 512; ++half) {
                    copy_or_zero<16>(to + i * PITCH + half * 512 + lane * 16,
                                     from + half * 512 + lane * 16, r + i < rows);
                }
            }
            if (FP8 && !left_out) {
                const unsigned at = to + lane / 4 * PITCH;
                copy_or_zero<16>(at + 512 + part * 16, row + 512 + part * 16, mine < rows);
                if (part == 0) copy_or_zero<8>(at + ROW_BYTES, scale, mine < rows);
            }
        }
    }

    // Starts copying what gather<true> leaves out: those of this block's keys first .. first + rows
    // - 1 that the step has written. A warp takes one at a time.
    __device__ __forceinline__ void gather_new(unsigned char* stage, int first, int rows) const {
        const int lane = threadIdx.x % WARP;
        const int in_window = window_keys - new_window;
        const int written = in_window + all - new_entries;
        for (int i = threadIdx.x / WARP; i < written; i += WARPS) {
            const int key = i < in_window ? new_window + i : new_entries + i - in_window;
            const int turn = key >> 2, j = turn / ranks * 4 + (key & 3);
            if (turn % ranks != rank || j < first || j >= first + rows) continue;
            const unsigned char *row, *scale;
            address(j, row, scale);
            unsigned char* to = stage + (j - first) * PITCH;
            for (int at = lane * 16; at < ROW_BYTES; at += WARP * 16)
                copy_or_zero<16>(shared_address(to + at), row + at, true);
            // Around L1, which may hold what was there when neighbours were asked for.
            if (FP8 && lane == 0)
                *reinterpret_cast<uint2*>(to + ROW_BYTES) =
                    __ldcg(reinterpret_cast<const uint2*>(scale));
        }
    }

    // The rows of the first tiles, in groups of copies: keys_KD = torch.cat([window_rows,
    // entries[indices]]), as stored.
    __device__ __forceinline__ void request_first(Shared& shared) const {
#pragma unroll
        for (int chunk = 0; chunk < STAGES * CHUNKS; ++chunk) {
            const int rows = min(count - chunk * CHUNK, CHUNK);
            if (rows > 0)
                gather<EARLY>(shared.rows[0] + chunk * CHUNK * PITCH, chunk * CHUNK, rows);
            cp_async_commit();
        }
    }

    // The rows of any other tile.
    __device__ __forceinline__ void request(int tile, Shared& shared) const {
        unsigned char* stage = shared.rows[tile % STAGES];
        gather<EARLY>(stage, tile * TILE, rows_of(tile));
        if (EARLY) gather_new(stage, tile * TILE, rows_of(tile));
        cp_async_commit();
    }

    __device__ __forceinline__ int tiles() const { return (count + TILE - 1) / TILE; }
    __device__ __forceinline__ int rows_of(int tile) const {
        return min(count - tile * TILE, TILE);
    }
};
