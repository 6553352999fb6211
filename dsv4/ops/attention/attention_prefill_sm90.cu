// attention_prefill by wgmma: Hopper only, rows of 512. The blocks are persistent and each takes
// one token and 64 heads at a time. Two warpgroups split the 512 columns: warpgroup g multiplies
// columns 256g .. 256g + 255 of queries and keys, the two partial logits are added through shared
// memory (g finishes 8 of every 16 heads), and both multiply the same weights with their half of
// the values. A third warpgroup gathers tiles and queries ahead of them.
#include "attention_sm90.cuh"

constexpr int CONSUMERS = 2 * GROUP_THREADS;
constexpr int THREADS = CONSUMERS + GROUP_THREADS;
// Registers per thread: as many as three equal groups of 168 have.
constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 56;
constexpr int HALF_BLOCKS = COLUMN_BLOCKS / 2;

// Byte offsets in shared memory; the launcher knows the sum, and adds 1 KiB for the alignment.
constexpr int QUERIES = 0;
constexpr int TILES = QUERIES + TILE_BYTES;
constexpr int WEIGHTS = TILES + 2 * TILE_BYTES;  // bf16 [64 heads][64 keys]
constexpr int EXCHANGE = WEIGHTS + BLOCK_BYTES;  // float [2 warpgroups][16][128]
constexpr int SHRINK = EXCHANGE + 16384;         // float [64]: factor of the old sums
constexpr int INVERSE = SHRINK + 256;            // float [64]: 1 / denominator
constexpr int TURNS = INVERSE + 256;             // Turn [32]
constexpr int MASKS = TURNS + 256;               // TileMask [2 tiles]
constexpr int NOTES = MASKS + 32;                // TileNote [2 tiles]
constexpr int BARRIERS = NOTES + 32;             // int64 [5]
#ifdef SHARED_BYTES
static_assert(BARRIERS + 5 * sizeof(int64) + 1024 <= SHARED_BYTES, "the launcher allocates less");
#endif

__device__ __forceinline__ bool producers_any(bool value) {
    return any_of<GROUP_THREADS>(1, value);
}
__device__ __forceinline__ void consumers_meet() { meet<CONSUMERS>(2); }
__device__ __forceinline__ bool consumers_any(bool value) { return any_of<CONSUMERS>(2, value); }

// d [64, 64] = or += a [64, 16] b [64, 16]^T, both with the summed dimension contiguous.
__device__ __forceinline__ void multiply_rows(float (&d)[32], unsigned long long a,
                                              unsigned long long b, int adds) {
    WGMMA_SHARED(64, 0, 0, REGS32, 32, 33, 34, F16(d, 0), F16(d, 16));
}

// d [64, 256] = or += a [64, 16] b [16, 256]; b has its columns contiguous.
__device__ __forceinline__ void multiply_columns(float (&d)[128], unsigned long long a,
                                                 unsigned long long b, int adds) {
    WGMMA_SHARED(256, 0, 1, REGS128, 128, 129, 130, F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48),
                 F16(d, 64), F16(d, 80), F16(d, 96), F16(d, 112));
}

// Four 8 x 8 matrices of bf16 from the registers of a warp to shared memory; lane l has the address
// of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(unsigned address, unsigned a, unsigned b, unsigned c,
                                               unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// One token and 64 heads.
struct Unit {
    int token, first_head, position;
};

// What the producer says about a tile: its unit, and if it is the unit's first, an ordinary one, or
// none at all.
enum : int { TILE_ENDS = 0, TILE_STARTS_UNIT = 1, TILE_CONTINUES = 2 };
struct alignas(16) TileNote {
    Unit unit;
    int kind;
};

// Walks over the tiles of a block's units, without those that hold no key. For the producer's
// threads.
struct Cursor {
    int index, step, units, head_groups, tokens;
    Unit unit;
    Seen seen;
    int tile, next_position;
    TileRows<GROUP_THREADS> rows;

    __device__ __forceinline__ int token_at(int at) const {
        // Late tokens see most keys: they go first, so that the last units to run are short.
        return tokens - 1 - at / head_groups;
    }
    __device__ __forceinline__ bool alive() const { return index < units; }
    // The queries and the list of the unit after this one are brought to the L2 cache meanwhile.
    __device__ __forceinline__ void start_unit(const Keys& keys, const int64* positions,
                                               const bf16* q, int heads, int thread) {
        unit = Unit{token_at(index), index % head_groups * HEADS, next_position};
        seen = seen_by(keys, unit.token, unit.position);
        tile = 0;
        if (index + step >= units) return;
        const int token = token_at(index + step);
        const int first_head = (index + step) % head_groups * HEADS;
        next_position = (int)positions[token];
        if (thread == 0) {
            prefetch_bulk(q + ((int64)token * heads + first_head) * DIM,
                          min(heads - first_head, HEADS) * DIM * 2);
            if (keys.selected && keys.listed % 2 == 0)
                prefetch_bulk(keys.selected + (int64)token * keys.listed, keys.listed * 8);
        }
    }
    // To the next tile that has a key; true if it is the first of a unit.
    __device__ __forceinline__ bool advance(const Keys& keys, const int64* positions, const bf16* q,
                                            int heads, int thread) {
        bool first = false;
        for (tile++; alive(); tile++) {
            if (tile * TILE >= seen.keys) {
                index += step;
                first = true;
                if (!alive()) break;
                start_unit(keys, positions, q, heads, thread);
            }
            rows.find(seen, tile * TILE, thread);
            if (!seen.list || tile == 0) break;
            if (producers_any(rows.any(seen, tile * TILE, thread))) break;
        }
        return first;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_prefill_sm90(const bf16* q, const bf16* ring, const bf16* compressed,
                           const int64* selected, const float* sink, const int64* positions,
                           const float* inv_freq, bf16* out, int tokens, int heads, int ring_slots,
                           int compressed_slots, int listed, int ratio, int window,
                           float softmax_scale) {
    extern __shared__ unsigned char shared_raw[];
    unsigned char* shared = shared_raw + (-shared_address(shared_raw) & 1023);
    const unsigned base = shared_address(shared);
    TileNote* notes = reinterpret_cast<TileNote*>(shared + NOTES);
    // `arrived` and `released`: of each buffer; `multiplied`: the logits of a tile are done, and
    // with them the queries.
    const unsigned arrived = base + BARRIERS;
    const unsigned released = arrived + 16;
    const unsigned multiplied = released + 16;
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP_THREADS, 0);
    const int thread = threadIdx.x % GROUP_THREADS;
    const int warp = thread / WARP;
    const int lane = thread % WARP;
    if (threadIdx.x == 0) {
        for (int buffer = 0; buffer < 2; buffer++) {
            barrier_init(arrived + buffer * 8, GROUP_THREADS);
            barrier_init(released + buffer * 8, CONSUMERS / WARP);
        }
        barrier_init(multiplied, 1);
    }
    __syncthreads();
    pdl_wait();
    pdl_launch();

    if (group == 2) {
        fewer_registers<PRODUCER_REGISTERS>();
        const Keys keys{
            ring, compressed, selected, ring_slots, compressed_slots, listed, ratio, window,
        };
        Cursor cursor;
        cursor.index = blockIdx.x, cursor.step = gridDim.x, cursor.tokens = tokens;
        cursor.head_groups = (heads + HEADS - 1) / HEADS;
        cursor.units = tokens * cursor.head_groups;
        cursor.next_position = (int)positions[cursor.token_at(cursor.index)];
        cursor.start_unit(keys, positions, q, heads, thread);
        cursor.rows.find(cursor.seen, 0, thread);
        bool first = true;
        for (int count = 0;; count++) {
            const int buffer = count & 1;
            if (count >= 2) barrier_wait(released + buffer * 8, count / 2 - 1 & 1);
            if (cursor.alive()) {
                // keys_KD = torch.cat([window_rows, entries[indices]])[tile]
                cursor.rows.gather<COLUMN_BLOCKS>(base + TILES + buffer * TILE_BYTES,
                                                  shared + MASKS + buffer * 16, keys, cursor.seen,
                                                  cursor.tile * TILE, 0, thread);
                if (first) {
                    // q_HD = q_THD[token, first_head : first_head + HEADS]
                    if (count > 0) barrier_wait(multiplied, count - 1 & 1);
                    const bf16* from =
                        q + ((int64)cursor.unit.token * heads + cursor.unit.first_head) * DIM;
                    const int head_count = heads - cursor.unit.first_head;
                    load_queries<GROUP_THREADS, HALF_BLOCKS>(base + QUERIES, from, head_count, 0,
                                                             thread);
                    load_queries<GROUP_THREADS, HALF_BLOCKS>(
                        base + QUERIES + HALF_BLOCKS * BLOCK_BYTES, from + HALF_BLOCKS * 64,
                        head_count, 8, thread);
                }
            }
            if (thread == 0) {
                const int kind = !cursor.alive() ? TILE_ENDS
                                 : first         ? TILE_STARTS_UNIT
                                                 : TILE_CONTINUES;
                notes[buffer] = TileNote{cursor.unit, kind};
            }
            cp_async_commit();
            cp_async_wait<0>();
            proxy_fence();
            barrier_arrive(arrived + buffer * 8);
            if (!cursor.alive()) return;
            first = cursor.advance(keys, positions, q, heads, thread);
        }
    }

    more_registers<CONSUMER_REGISTERS>();
    float* shrink = reinterpret_cast<float*>(shared + SHRINK);
    float* inverse = reinterpret_cast<float*>(shared + INVERSE);
    Turn* turns = reinterpret_cast<Turn*>(shared + TURNS);
    const unsigned half = group * HALF_BLOCKS * BLOCK_BYTES;  // of a tile
    // This thread's logits: keys 8n + 2 (lane % 4) + {0, 1} of head `row`. Its results: heads
    // first_row, first_row + 8. The second warpgroup's queries have heads i and i ^ 8 exchanged, so
    // that both keep the first half of what they compute and send the second.
    const int first_row = warp * 16 + lane / 4, row = first_row + group * 8;
    float* mailbox = reinterpret_cast<float*>(shared + EXCHANGE) + group * 2048 + thread;
    const float* partner =
        reinterpret_cast<float*>(shared + EXCHANGE) + (group ^ 1) * 2048 + thread;
    const unsigned weights_store =
        base + WEIGHTS + swizzled(warp * 16 + group * 8 + lane % 8, lane / 8);
    const float to_log2 = softmax_scale * LOG2_E;

    float s[32], o[128];
    // logits_HK = q_HD @ keys_KD.T, over this warpgroup's half of the columns
    auto start_logits = [&](int buffer) {
        pin(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 16; step++) {
            const unsigned offset = half + step / 4 * BLOCK_BYTES + step % 4 * 32;
            multiply_rows(s, swizzled_rows(base + QUERIES + offset),
                          swizzled_rows(base + TILES + buffer * TILE_BYTES + offset), step > 0);
        }
        wgmma_commit();
    };

    barrier_wait_unlimited(arrived, 0);
    start_logits(0);
    Unit unit = notes[0].unit;
    bool unit_starts = true;
    float peak = NO_LOGIT;
    float sum = 0.0f;
    float sink_log2 = 0.0f;
    for (int count = 0;; count++) {
        const int buffer = count & 1;
        wgmma_wait<0>();
        pin(s);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) mailbox[(n * 2 + i) * GROUP_THREADS] = s[n * 4 + 2 + i];
        consumers_meet();
        if (threadIdx.x == 0) barrier_arrive(multiplied);

        // logits_HK = half_HK + other_half_HK; logits_HK[:, ~visible_K] = -inf
        float logit[16], highest = NO_LOGIT;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                logit[n * 2 + i] = s[n * 4 + i] + partner[(n * 2 + i) * GROUP_THREADS];
        const TileMask mask(shared + MASKS + buffer * 16);
        if (!mask.full()) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                if (!mask.has(i / 2, i % 2, lane)) logit[i] = NO_LOGIT;
        }
        // The maximum rarely rises: the weights are computed with the old one while the new one is
        // being found.
        // p_HK = exp(logits_HK * softmax_scale - peak_H)
        unsigned weights[8];
        float added;
        auto weigh = [&] {
            added = 0.0f;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float left = exp2_fast(fmaf(logit[n * 2], to_log2, -peak));
                const float right = exp2_fast(fmaf(logit[n * 2 + 1], to_log2, -peak));
                added += left + right;
                weights[n] = packed_bits(left, right);
            }
        };
        weigh();
#pragma unroll
        for (int i = 0; i < 16; i++) highest = fmaxf(highest, logit[i]);
        // peak_H = max(peak_H, logits_HK.amax(-1)); sum_H = sum_H * factor_H + p_HK.sum(-1)
        const float raised = raised_peak(peak, quad_max(highest) * to_log2);
        float factor = 1.0f;
        if (__any_sync(~0u, raised != peak)) {
            if (raised != peak) factor = exp2_fast(peak - raised);
            peak = raised;
            weigh();
        }
        sum = sum * factor + added;
        if (lane % 4 == 0) shrink[row] = factor;
        store_matrices(weights_store, weights[0], weights[1], weights[2], weights[3]);
        store_matrices(weights_store ^ 64, weights[4], weights[5], weights[6], weights[7]);
        proxy_fence();
        // The first product of a unit replaces the sums.
        if (consumers_any(factor != 1.0f) && !unit_starts) {
            const float factors[2] = {shrink[first_row], shrink[first_row + 8]};
#pragma unroll
            for (int i = 0; i < 128; i++) o[i] *= factors[i / 2 % 2];
        }
        pin(o);
        wgmma_fence();
        // out_HD = out_HD * factor_H + p_HK @ keys_KD
#pragma unroll
        for (int step = 0; step < TILE / 16; step++)
            multiply_columns(
                o, swizzled_rows(base + WEIGHTS + step * 32),
                swizzled_columns(base + TILES + buffer * TILE_BYTES + half + step * 16 * 128,
                                 BLOCK_BYTES),
                step > 0 || !unit_starts);
        wgmma_commit();

        // The logits of the next tile follow at once; after the last tile they are computed from
        // anything and dropped.
        barrier_wait_unlimited(arrived + (buffer ^ 1) * 8, (count + 1) / 2 & 1);
        start_logits(buffer ^ 1);
        const TileNote next = notes[buffer ^ 1];
        const bool unit_ends = next.kind != TILE_CONTINUES;
        if (unit_starts) {
            sink_log2 = row < heads - unit.first_head ? sink[unit.first_head + row] * LOG2_E : 0.0f;
            if (group == 1 && warp == 0) output_turns(turns, inv_freq, unit.position, lane);
        }
        wgmma_wait<1>();
        pin(o);
        if (unit_ends) {
            // out_HD = rope(out_HD / (sum_H + exp(sink_H - peak_H)), position, inverse=True)
            sum = quad_sum(sum);
            if (lane % 4 == 0) inverse[row] = 1.0f / (sum + exp2_fast(sink_log2 - peak));
            peak = NO_LOGIT, sum = 0.0f;
            consumers_meet();
            const float scale[2] = {inverse[first_row], inverse[first_row + 8]};
#pragma unroll
            for (int i = 0; i < 128; i++) o[i] *= scale[i / 2 % 2];
            if (group == 1) {
#pragma unroll
                for (int i = 96; i < 128; i += 2) {
                    const unsigned pair =
                        rotated(o[i], o[i + 1], (i - 96) / 4 * 8 + lane % 4 * 2, turns);
                    o[i] = __uint_as_float(pair << 16);
                    o[i + 1] = __uint_as_float(pair & 0xffff0000u);
                }
            }
            // Through the buffer of this tile, so that whole lines are written.
            const unsigned staged = base + TILES + buffer * TILE_BYTES + half;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const unsigned store = staged + swizzled(warp * 16 + i * 8 + lane % 8, lane / 8);
#pragma unroll
                for (int n = 0; n < 32; n += 4) {
                    const float* from = o + n * 4 + i * 2;
                    store_matrices((store ^ n % 8 * 16) + n / 8 * BLOCK_BYTES,
                                   packed_bits(from[0], from[1]), packed_bits(from[4], from[5]),
                                   packed_bits(from[8], from[9]), packed_bits(from[12], from[13]));
                }
            }
            __syncwarp();
            bf16* target =
                out + ((int64)unit.token * heads + unit.first_head) * DIM + group * 256 + lane * 8;
#pragma unroll 8
            for (int i = 0; i < 16; i++) {
                const int head = warp * 16 + i;
                const uint4 value =
                    load_shared16(staged + lane / 8 * BLOCK_BYTES + swizzled(head, lane % 8));
                if (head < heads - unit.first_head)
                    *reinterpret_cast<uint4*>(target + head * DIM) = value;
            }
        }
        if (next.kind == TILE_ENDS) break;
        __syncwarp();
        if (lane == 0) barrier_arrive(released + buffer * 8);
        unit_starts = unit_ends;
        if (unit_starts) unit = next.unit;
    }
    wgmma_wait<0>();
    pin(s);
}
