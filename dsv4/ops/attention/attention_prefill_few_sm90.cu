// attention_prefill by wgmma for at most 32 heads, as a rank has them: Hopper only, rows of 512.
// Keys are the rows of the products and heads their columns, so that no product is of heads that do
// not exist, and one warpgroup holds the results of a token. Another one gathers keys ahead of it,
// a column block of a tile at a time. The blocks are persistent and take token after token, and two
// of them share a multiprocessor: one computes softmax weights while the other multiplies.
#include "attention_sm90.cuh"

static_assert(HEADS == 16 || HEADS == 32, "a warpgroup holds the results");
constexpr int THREADS = 2 * GROUP_THREADS;
// Registers per thread: as many as two equal groups of 128 have.
constexpr int CONSUMER_REGISTERS = HEADS == 32 ? 192 : 152;
constexpr int PRODUCER_REGISTERS = 256 - CONSUMER_REGISTERS;
constexpr int WARPS = GROUP_THREADS / WARP;
constexpr int OCTETS = HEADS / 8;
// Column blocks of keys on their way or in use: those of a tile, and what else fits.
constexpr int STAGES = HEADS == 32 ? 9 : 11;
static_assert(STAGES > COLUMN_BLOCKS, "a tile is in use while the next one comes");
// Tiles with notes: that of a tile comes when all of its keys are asked for, so when the values of
// the tile before are being multiplied.
constexpr int TILES = 2;
// The logits wait for so many column blocks at a time.
constexpr int PART = 2;

// Byte offsets in shared memory; the launcher knows the sum, and adds 1 KiB for the alignment.
constexpr int RING = 0;
constexpr int QUERIES = RING + STAGES * BLOCK_BYTES;
constexpr int WEIGHTS = QUERIES + COLUMN_BLOCKS * QUERY_BLOCK_BYTES;  // bf16 [heads][64 keys]
constexpr int PARTIAL = WEIGHTS + QUERY_BLOCK_BYTES;  // float [warps][heads]: maxima or sums
constexpr int SINKS = PARTIAL + WARPS * HEADS * 4;    // float [heads], times log2(e)
constexpr int TURNS = SINKS + HEADS * 4;              // Turn [32]
constexpr int NOTES = TURNS + 256;                    // TileNote [tiles]
constexpr int BARRIERS = NOTES + TILES * 32;          // int64 [2 stages + tiles + 1]
#ifdef SHARED_BYTES
static_assert(BARRIERS + (2 * STAGES + TILES + 1) * sizeof(int64) + 1024 <= SHARED_BYTES,
              "the launcher allocates less");
#endif

__device__ __forceinline__ void consumers_meet() { meet<GROUP_THREADS>(1); }
__device__ __forceinline__ bool consumers_any(bool value) {
    return any_of<GROUP_THREADS>(1, value);
}

#if HEADS == 32
#define MULTIPLY(TURN) WGMMA_SHARED(32, TURN, 0, REGS16, 16, 17, 18, F16(d, 0))
#else
#define MULTIPLY(TURN) WGMMA_SHARED(16, TURN, 0, REGS8, 8, 9, 10, F4(d, 0), F4(d, 4))
#endif
// d [64, HEADS] = or += a [64, 16] b [HEADS, 16]^T, both with the summed dimension contiguous.
__device__ __forceinline__ void multiply_keys(float (&d)[HEADS / 2], unsigned long long a,
                                              unsigned long long b, int adds) {
    MULTIPLY(0);
}

// The same with a [16, 64]^T, which has its columns contiguous.
__device__ __forceinline__ void multiply_values(float (&d)[HEADS / 2], unsigned long long a,
                                                unsigned long long b, int adds) {
    MULTIPLY(1);
}

// Two 8 x 8 matrices of bf16 from the registers of a warp to shared memory, rows becoming columns;
// lane l has the address of row l % 8 of matrix l / 8 % 2.
__device__ __forceinline__ void store_turned(unsigned address, unsigned a, unsigned b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
                 "r"(a), "r"(b)
                 : "memory");
}

// Over the lanes that hold other keys of the same heads.
__device__ __forceinline__ float lanes_max(float value) {
#pragma unroll
    for (int other = 4; other < WARP; other *= 2)
        value = fmaxf(value, __shfl_xor_sync(~0u, value, other));
    return value;
}
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
    for (int other = 4; other < WARP; other *= 2) value += __shfl_xor_sync(~0u, value, other);
    return value;
}

// What follows a tile: one of the same token, one of another, or nothing.
enum : int { TOKEN_CONTINUES, TOKEN_ENDS, ALL_ENDS };
// What the producer says about a tile. `present`: a bit for each of 64 keys.
struct alignas(16) TileNote {
    int token, position, then;
    unsigned present[2];
};

// A stage of the ring and how often the ring was gone round.
struct Stage {
    int slot = 0;
    unsigned round = 0;

    __device__ __forceinline__ void advance() {
        slot++;
        if (slot >= STAGES) slot -= STAGES, round++;
    }
};

// Walks over the tiles of a block's tokens, without those that hold no key. Late tokens see most
// keys: they go first, so that the last ones are short. Every producer warp walks for itself; its
// lanes look for rows `lane` and lane + 32 of a tile.
struct Walk {
    int token, step, position, next_position;
    Seen seen;
    int tile;
    // Compressed entries of this tile and of the one behind it, negative for none.
    int entry[2], ahead[2];
    unsigned present[2];

    __device__ __forceinline__ bool alive() const { return token >= 0; }
    __device__ __forceinline__ void find(int (&entries)[2], int tile, int lane) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int index = tile * TILE + half * WARP + lane - seen.window_keys;
            const bool exists = index >= 0 && index < seen.keys - seen.window_keys;
            entries[half] =
                read_entry(seen.list + index, exists && seen.list, exists ? index : -1);
        }
    }
    __device__ __forceinline__ bool windowed(int half, int lane) const {
        return tile * TILE + half * WARP + lane < seen.window_keys;
    }
    // The queries and the list of the token after this one are brought to the L2 cache meanwhile.
    __device__ __forceinline__ void start_token(const Keys& keys, const int64* positions,
                                                const bf16* q, int heads, int lane) {
        position = next_position;
        seen = seen_by(keys, token, position);
        tile = 0;
        find(entry, 0, lane);
        const int following = token - step;
        if (following < 0) return;
        next_position = (int)positions[following];
        if (threadIdx.x == GROUP_THREADS) {
            prefetch_bulk(q + (int64)following * heads * DIM, heads * DIM * 2);
            if (keys.selected && keys.listed % 2 == 0)
                prefetch_bulk(keys.selected + (int64)following * keys.listed, keys.listed * 8);
        }
    }
    __device__ __forceinline__ void look(int lane) {
        find(ahead, tile + 1, lane);
#pragma unroll
        for (int half = 0; half < 2; half++)
            present[half] = __ballot_sync(~0u, windowed(half, lane) || entry[half] >= 0);
    }
    // To the next tile that has a key; true if it is the first of a token.
    __device__ __forceinline__ bool advance(const Keys& keys, const int64* positions, const bf16* q,
                                            int heads, int lane) {
        do {
            tile++;
            if (tile * TILE >= seen.keys) {
                token -= step;
                if (alive()) start_token(keys, positions, q, heads, lane), look(lane);
                return true;
            }
            entry[0] = ahead[0], entry[1] = ahead[1];
            look(lane);
        } while (!(present[0] | present[1]));
        return false;
    }
    // Where a lane's row is; an odd address for none, which is not read.
    __device__ __forceinline__ unsigned long long row(const Keys& keys, int half, int lane) const {
        int slot = seen.first_slot + tile * TILE + half * WARP + lane;
        if (slot >= keys.ring_slots) slot -= keys.ring_slots;
        // No array is indexed by a variable, so that all of them stay in registers.
        const int listed = half ? entry[1] : entry[0];
        const bool in_window = windowed(half, lane), take = in_window || listed >= 0;
        const bf16* rows = in_window || !take ? keys.ring : keys.compressed;
        const int64 index = in_window ? slot : take ? listed : 0;
        return reinterpret_cast<unsigned long long>(rows + index * DIM) | !take;
    }
};

// The softmax of a token's heads, by the threads that hold its logits: of heads 8n + 2 (lane % 4) +
// {0, 1}, two keys each.
struct Softmax {
    float peak[OCTETS][2], sum[OCTETS][2];

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int n = 0; n < OCTETS; n++)
            peak[n][0] = peak[n][1] = NO_LOGIT, sum[n][0] = sum[n][1] = 0.0f;
    }
    __device__ __forceinline__ bool exceeded(const float (&s)[HEADS / 2], float to_log2) const {
        bool exceeds = false;
#pragma unroll
        for (int i = 0; i < HEADS / 2; i++)
            exceeds |= s[i] * to_log2 > peak[i / 4][i % 2] + PEAK_SLACK;
        return exceeds;
    }
    // peak_H = max(peak_H, logits_KH.amax(0)); sum_H *= factor_H
    __device__ __forceinline__ void raise(const float (&s)[HEADS / 2], float to_log2,
                                          float* partial, float (&factor)[OCTETS][2], int warp,
                                          int lane) {
#pragma unroll
        for (int n = 0; n < OCTETS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float highest = lanes_max(fmaxf(s[n * 4 + i], s[n * 4 + i + 2]));
                if (lane < 4) partial[(warp * OCTETS + n) * 8 + lane * 2 + i] = highest;
            }
        consumers_meet();
#pragma unroll
        for (int n = 0; n < OCTETS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float highest = NO_LOGIT;
#pragma unroll
                for (int other = 0; other < WARPS; other++)
                    highest =
                        fmaxf(highest, partial[(other * OCTETS + n) * 8 + lane % 4 * 2 + i]);
                const float raised = raised_peak(peak[n][i], highest * to_log2);
                factor[n][i] = raised == peak[n][i] ? 1.0f : exp2_fast(peak[n][i] - raised);
                peak[n][i] = raised;
                sum[n][i] *= factor[n][i];
            }
    }
    // p_KH = exp(logits_KH - peak_H); sum_H += p_KH.sum(0)
    __device__ __forceinline__ void weigh(const float (&s)[HEADS / 2], float to_log2,
                                          unsigned weights) {
#pragma unroll
        for (int n = 0; n < OCTETS; n++) {
            float weight[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                weight[i] = exp2_fast(fmaf(s[n * 4 + i], to_log2, -peak[n][i % 2]));
            sum[n][0] += weight[0] + weight[2], sum[n][1] += weight[1] + weight[3];
            store_turned(weights + n * 1024, packed_bits(weight[0], weight[1]),
                         packed_bits(weight[2], weight[3]));
        }
    }
    // 1 / (sum_H + exp(sink_H - peak_H))
    __device__ __forceinline__ void finish(float (&scale)[OCTETS][2], const float* sinks,
                                           float* partial, int warp, int lane) {
#pragma unroll
        for (int n = 0; n < OCTETS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float total = lanes_sum(sum[n][i]);
                if (lane < 4) partial[(warp * OCTETS + n) * 8 + lane * 2 + i] = total;
            }
        consumers_meet();
#pragma unroll
        for (int n = 0; n < OCTETS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int head = n * 8 + lane % 4 * 2 + i;
                float total = exp2_fast(sinks[head] - peak[n][i]);
#pragma unroll
                for (int other = 0; other < WARPS; other++) total += partial[other * HEADS + head];
                scale[n][i] = 1.0f / total;
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_prefill_few_sm90(const bf16* q, const bf16* ring, const bf16* compressed,
                               const int64* selected, const float* sink, const int64* positions,
                               const float* inv_freq, bf16* out, int tokens, int heads,
                               int ring_slots, int compressed_slots, int listed, int ratio,
                               int window, float softmax_scale) {
    extern __shared__ unsigned char shared_raw[];
    unsigned char* shared = shared_raw + (-shared_address(shared_raw) & 1023);
    const unsigned base = shared_address(shared);
    TileNote* notes = reinterpret_cast<TileNote*>(shared + NOTES);
    float* sinks = reinterpret_cast<float*>(shared + SINKS);
    // `arrived` and `released`: of each stage; `noted`: of each tile; `multiplied`: the logits of a
    // token are done, and with them its queries.
    const unsigned arrived = base + BARRIERS;
    const unsigned released = arrived + STAGES * 8;
    const unsigned noted = released + STAGES * 8;
    const unsigned multiplied = noted + TILES * 8;
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP_THREADS, 0);
    const int lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STAGES; slot++) {
            barrier_init(arrived + slot * 8, GROUP_THREADS);
            barrier_init(released + slot * 8, WARPS);
        }
        for (int tile = 0; tile < TILES; tile++) barrier_init(noted + tile * 8, 1);
        barrier_init(multiplied, WARPS);
    }
    if (threadIdx.x < HEADS)
        sinks[threadIdx.x] = threadIdx.x < heads ? sink[threadIdx.x] * LOG2_E : 0.0f;
    __syncthreads();
    pdl_wait();
    pdl_launch();

    if (group > 0) {
        fewer_registers<PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(~0u, threadIdx.x / WARP - WARPS, 0);
        const Keys keys{
            ring, compressed, selected, ring_slots, compressed_slots, listed, ratio, window,
        };
        Walk walk;
        walk.token = tokens - 1 - blockIdx.x, walk.step = gridDim.x;
        walk.next_position = (int)positions[walk.token];
        walk.start_token(keys, positions, q, heads, lane);
        walk.look(lane);
        Stage stage;
        bool first = true;
        unsigned walked = 0;
        for (int tile = 0; walk.alive(); tile++) {
            // keys_KD = torch.cat([window_rows, entries[indices]])[tile]: 16 rows by this warp, of
            // which a lane copies a chunk of four
            const unsigned long long own_row = walk.row(keys, warp / 2, lane);
            const bf16* from[4];
            bool take[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned long long row =
                    __shfl_sync(~0u, own_row, warp % 2 * 16 + i * 4 + lane / 8);
                from[i] = reinterpret_cast<const bf16*>(row & ~1ull) + lane % 8 * 8;
                take[i] = !(row & 1);
            }
#pragma unroll
            for (int block = 0; block < COLUMN_BLOCKS; block++) {
                if (stage.round > 0) barrier_wait(released + stage.slot * 8, stage.round - 1 & 1);
                const unsigned target = base + RING + stage.slot * BLOCK_BYTES;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    copy_or_zero<16>(target + swizzled(warp * 16 + i * 4 + lane / 8, lane % 8),
                                     from[i] + block * 64, take[i]);
                if (first) {
                    // q_HD = q_THD[token]
                    if (block == 0 && walked > 0) barrier_wait(multiplied, walked - 1 & 1);
                    load_queries<GROUP_THREADS, 1>(
                        base + QUERIES + block * QUERY_BLOCK_BYTES,
                        q + (int64)walk.token * heads * DIM + block * 64, heads, 0,
                        threadIdx.x - GROUP_THREADS);
                }
                cp_async_arrive(arrived + stage.slot * 8);
                stage.advance();
            }
            walked += first;
            TileNote note{walk.token, walk.position, 0, {walk.present[0], walk.present[1]}};
            first = walk.advance(keys, positions, q, heads, lane);
            if (threadIdx.x == GROUP_THREADS) {
                note.then = !walk.alive() ? ALL_ENDS : first ? TOKEN_ENDS : TOKEN_CONTINUES;
                notes[tile % TILES] = note;
                barrier_arrive(noted + tile % TILES * 8);
            }
        }
        return;
    }

    more_registers<CONSUMER_REGISTERS>();
    const int warp = threadIdx.x / WARP;
    float* partial = reinterpret_cast<float*>(shared + PARTIAL);
    Turn* turns = reinterpret_cast<Turn*>(shared + TURNS);
    // This thread's logits are of keys first_key and first_key + 8, its results of those columns of
    // each column block.
    const int first_key = warp * 16 + lane / 4;
    // Where a lane's row of two turned matrices goes: head lane % 8 of eight, 16 keys of this warp.
    const unsigned turned = swizzled(lane % 8, warp * 2 + lane / 8 % 2);
    const float to_log2 = softmax_scale * LOG2_E;

    float s[HEADS / 2], right[HEADS / 2], o[COLUMN_BLOCKS][HEADS / 2];
    Softmax softmax;
    Stage stage;
    bool token_starts = true;
    for (int tile = 0;; tile++) {
        // logits_KH = keys_KD @ q_HD.T, the left and the right half of the columns apart, as the
        // form for 64 heads has them: a rank adds up its logits in the order of a lone GPU.
        unsigned long long queries = swizzled_rows(base + QUERIES);
        // Its sums with constants are not worth a register each.
        asm volatile("" : "+l"(queries));
        Stage read = stage;
        pin(s), pin(right);
#pragma unroll
        for (int part = 0; part < COLUMN_BLOCKS; part += PART) {
            Stage wait = read;
#pragma unroll
            for (int block = 0; block < PART; block++) {
                barrier_wait_unlimited(arrived + wait.slot * 8, wait.round & 1);
                wait.advance();
            }
            proxy_fence();
            wgmma_fence();
#pragma unroll
            for (int block = part; block < part + PART; block++) {
                const auto keys = swizzled_rows(base + RING + read.slot * BLOCK_BYTES);
#pragma unroll
                for (int step = 0; step < 4; step++)
                    multiply_keys(block < COLUMN_BLOCKS / 2 ? s : right, keys + step * 2,
                                  queries + block * QUERY_BLOCK_BYTES / 16 + step * 2,
                                  block % (COLUMN_BLOCKS / 2) + step > 0);
                read.advance();
            }
        }
        wgmma_commit();
        barrier_wait_unlimited(noted + tile % TILES * 8, tile / TILES & 1);
        const TileNote& note = notes[tile % TILES];
        const int token = note.token, then = note.then;
        const unsigned present = note.present[warp / 2] >> first_key % 32;
        wgmma_wait<0>();
        pin(s), pin(right);
        if (lane == 0 && then == TOKEN_ENDS) barrier_arrive(multiplied);
        // logits_KH[~visible_K] = -inf
#pragma unroll
        for (int i = 0; i < HEADS / 2; i++) {
            s[i] += right[i];
            if (!(present >> i / 2 % 2 * 8 & 1)) s[i] = NO_LOGIT;
        }
        if (token_starts) softmax.start();
        // The maximum rarely rises. Behind this the weights of the tile before are no longer read.
        if (consumers_any(token_starts || softmax.exceeded(s, to_log2))) {
            float factor[OCTETS][2];
            if (token_starts && warp == 0) output_turns(turns, inv_freq, note.position, lane);
            softmax.raise(s, to_log2, partial, factor, warp, lane);
            // The first product of a token replaces the sums.
            if (!token_starts) {
#pragma unroll
                for (int block = 0; block < COLUMN_BLOCKS; block++)
#pragma unroll
                    for (int i = 0; i < HEADS / 2; i++) o[block][i] *= factor[i / 4][i % 2];
            }
        }
        softmax.weigh(s, to_log2, base + WEIGHTS + turned);
        proxy_fence();
        consumers_meet();

        // out_DH = out_DH + keys_KD.T @ p_KH
        unsigned long long weights = swizzled_rows(base + WEIGHTS);
        asm volatile("" : "+l"(weights));
        read = stage;
#pragma unroll
        for (int block = 0; block < COLUMN_BLOCKS; block++) pin(o[block]);
        wgmma_fence();
#pragma unroll
        for (int block = 0; block < COLUMN_BLOCKS; block++) {
            const auto values =
                swizzled_columns(base + RING + read.slot * BLOCK_BYTES, BLOCK_BYTES);
#pragma unroll
            for (int step = 0; step < TILE / 16; step++)
                multiply_values(o[block], values + step * 128, weights + step * 2,
                                step > 0 || !token_starts);
            wgmma_commit();
            read.advance();
        }
        auto release = [&] {
            if (lane == 0) barrier_arrive(released + stage.slot * 8);
            stage.advance();
        };
        wgmma_wait<7>(), release(), wgmma_wait<6>(), release();
        wgmma_wait<5>(), release(), wgmma_wait<4>(), release();
        wgmma_wait<3>(), release(), wgmma_wait<2>(), release();
        wgmma_wait<1>(), release(), wgmma_wait<0>(), release();
#pragma unroll
        for (int block = 0; block < COLUMN_BLOCKS; block++) pin(o[block]);
        token_starts = then != TOKEN_CONTINUES;
        if (!token_starts) continue;

        // out_HD = rope(out_HD / denominator_H, position, inverse=True). A warp has 16 columns of
        // each block, 32 bytes of a head, which go through its part of the weights.
        float scale[OCTETS][2];
        softmax.finish(scale, sinks, partial, warp, lane);
        const unsigned staged = base + WEIGHTS + warp * HEADS * 32;
        bf16* target = out + (int64)token * heads * DIM + warp * 16 + lane % 2 * 8;
#pragma unroll
        for (int block = 0; block < COLUMN_BLOCKS; block++) {
#pragma unroll
            for (int n = 0; n < OCTETS; n++) {
                const float* from = o[block] + n * 4;
                store_turned(staged + (lane / 8 % 2 * HEADS + n * 8 + lane % 8) * 16,
                             packed_bits(from[0] * scale[n][0], from[1] * scale[n][1]),
                             packed_bits(from[2] * scale[n][0], from[3] * scale[n][1]));
            }
            __syncwarp();
#pragma unroll
            for (int first = 0; first < HEADS; first += 16) {
                const int head = first + lane / 2;
                uint4 value = load_shared16(staged + (lane % 2 * HEADS + head) * 16);
                if (block == COLUMN_BLOCKS - 1) {
                    const int column = warp * 16 + lane % 2 * 8;
                    value.x = rotated(value.x, column, turns);
                    value.y = rotated(value.y, column + 2, turns);
                    value.z = rotated(value.z, column + 4, turns);
                    value.w = rotated(value.w, column + 6, turns);
                }
                if (head < heads)
                    *reinterpret_cast<uint4*>(target + head * DIM + block * 64) = value;
            }
            __syncwarp();
        }
        if (then == ALL_ENDS) return;
    }
}
