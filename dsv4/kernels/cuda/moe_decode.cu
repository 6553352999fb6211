// Mixture of experts for 1 to 8 tokens in one launch that streams every weight once.
//
//   phase 1  h = round(weight * silu(min(w1 x, limit)) * clamp(w3 x, limit)) for the shared expert and every distinct
//            routed expert of the step
//   phase 2  y = sum over those experts of w2 h, one list of K per 32 output rows
//
// One block per multiprocessor; all blocks meet between the phases, while the first weights of phase 2 are on their way.
// A work item is two row tiles of 16 (gate and up rows, or two tiles of the output) over a range of K. The K stages of an
// item are dealt to the warps of a block; each warp streams its own stages through its own ring in shared memory, so that
// no warp waits for another one's loads. The warps' sums meet in shared memory and one warp finishes the item. All orders
// of summation are fixed.
//
// Defines: ROUTED, SHARED (weight formats), TOKENS (1, 2, 4 or 8: tokens rounded up), TAILS (1: E or F is no multiple
// of a stage's columns), WARPS, STAGES (ring depth).
#include "weight_tile.cuh"

#ifndef WARPS
#define WARPS 8
#endif
#ifndef STAGES
#define STAGES 3
#endif

constexpr int THREADS = WARPS * WARP;
// Loads of a stage in flight to registers; all four take more than 128 registers on sm_100.
#if __CUDA_ARCH__ >= 1000
constexpr int UNROLL = 2;
#else
constexpr int UNROLL = 4;
#endif
constexpr int MAX_ENTRIES = 128, MAX_EXPERT_WORDS = 32, MAX_TOKENS = 8;
constexpr int PAIR_BYTES = 2 * (Stage<ROUTED>::BYTES > Stage<SHARED>::BYTES ? Stage<ROUTED>::BYTES : Stage<SHARED>::BYTES);
constexpr int STAGE_COLUMNS =
    Stage<ROUTED>::COLUMNS > Stage<SHARED>::COLUMNS ? Stage<ROUTED>::COLUMNS : Stage<SHARED>::COLUMNS;
// Items whose warp sums may be in shared memory at a time; the activations of eight tokens leave room for two.
constexpr int BUFFERS = TOKENS == 8 ? 2 : 4;
constexpr int PARTIAL = 2 * TOKENS * 16;
// Up to four tokens sit in the even columns of the MMA, so that only two of its four results per lane are live.
constexpr bool EVEN_COLUMNS = TOKENS <= 4;
constexpr bool ANY_BF16 = ROUTED == BF16 || SHARED == BF16;
constexpr bool ANY_F16 = ROUTED != BF16 || SHARED != BF16;

// ---- barriers -------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// ---- matrix products -----------------------------------------------------------------------------------------------

__device__ __forceinline__ float2 decode_scale_pair(unsigned pair) {
    const unsigned halves = decode8(pair);
    return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

// 2^(code - 127); code 0 is a subnormal. Code 255 (a NaN in the format) gives infinity.
__device__ __forceinline__ float decode_e8m0(unsigned code) { return __uint_as_float(max(code << 23, 1u << 22)); }

__device__ __forceinline__ void add_rows_scaled(float (&sum)[4], const float (&d)[4], float low, float high) {
    sum[0] = fmaf(d[0], low, sum[0]);
    sum[2] = fmaf(d[2], high, sum[2]);
    if (!EVEN_COLUMNS) {
        sum[1] = fmaf(d[1], low, sum[1]);
        sum[3] = fmaf(d[3], high, sum[3]);
    }
}

// What a lane reads of the activations: 16 bytes per 32 k, in B fragment order.
struct Activations {
    unsigned address;
    int stride;
    bool valid;

    __device__ __forceinline__ uint4 read(int k32) const {
        if (TOKENS > 1 && !valid) return make_uint4(0, 0, 0, 0);
        return load_shared16(address + k32 * (TOKENS == 1 ? 64 : stride));
    }
};

// sum += both row tiles of one load of weights, 4-bit ones with block scales, times activations.
template <int FORMAT>
__device__ __forceinline__ void multiply_load(float (&sum)[2][4], unsigned slot, int load, const Activations& x, int lane) {
    uint4 words[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
        words[tile] = load_shared16(slot + tile * Stage<FORMAT>::BYTES + load * LOAD_BYTES + lane * 16);
    if constexpr (FORMAT == NVFP4 || FORMAT == MXFP4) {
        const uint4 low = x.read(2 * load), high = x.read(2 * load + 1);
        const unsigned b[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const unsigned word[4] = {words[tile].x, words[tile].y, words[tile].z, words[tile].w};
            const unsigned scales = slot + tile * Stage<FORMAT>::BYTES + STAGE_DATA + load * Stage<FORMAT>::CHUNK_SCALE;
            unsigned a[4];
            if constexpr (FORMAT == NVFP4) {
                const uint2 codes = load_shared8(scales + (lane >> 2) * 8);
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    decode4(word[step], a);
                    mma<true>(d, a, b[2 * step], b[2 * step + 1]);
                    const unsigned halves = decode8((step < 2 ? codes.x : codes.y) >> (16 * (step & 1)));
                    const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&halves));
                    add_rows_scaled(sum[tile], d, scale.x, scale.y);
                }
            } else {
                const unsigned codes = load_shared4(scales + (lane >> 2) * 4);
#pragma unroll
                for (int block = 0; block < 2; ++block) {
                    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    decode4(word[2 * block], a);
                    mma<true>(d, a, b[4 * block], b[4 * block + 1]);
                    decode4(word[2 * block + 1], a);
                    mma<true>(d, a, b[4 * block + 2], b[4 * block + 3]);
                    add_rows_scaled(sum[tile], d, decode_e8m0((codes >> (16 * block)) & 255),
                                    decode_e8m0((codes >> (16 * block + 8)) & 255));
                }
            }
        }
    } else if constexpr (FORMAT == FP8) {
        const uint4 b = x.read(load);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const uint4 w = words[tile];
            const unsigned first[4] = {decode8(w.x), decode8(w.x >> 16), decode8(w.y), decode8(w.y >> 16)};
            const unsigned second[4] = {decode8(w.z), decode8(w.z >> 16), decode8(w.w), decode8(w.w >> 16)};
            mma<true>(sum[tile], first, b.x, b.y);
            mma<true>(sum[tile], second, b.z, b.w);
        }
    } else {
        const uint4 b = x.read(load / 2);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const unsigned a[4] = {words[tile].x, words[tile].y, words[tile].z, words[tile].w};
            mma<false>(sum[tile], a, load & 1 ? b.z : b.x, load & 1 ? b.w : b.y);
        }
    }
}

// total += (low, high) * (both row tiles of one stage). `low` and `high` belong to the two columns of a lane.
template <int FORMAT>
__device__ __forceinline__ void multiply_stage(float (&total)[2][4], unsigned slot, const Activations& x, float low,
                                               float high, int lane) {
    float sum[2][4] = {};
#pragma unroll UNROLL
    for (int load = 0; load < STAGE_LOADS; ++load) multiply_load<FORMAT>(sum, slot, load, x, lane);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        float unit = 1.0f;
        if constexpr (FORMAT == FP8)
            unit = __uint_as_float(load_shared4(slot + tile * Stage<FORMAT>::BYTES + STAGE_DATA));
        total[tile][0] = fmaf(sum[tile][0], unit * low, total[tile][0]);
        total[tile][2] = fmaf(sum[tile][2], unit * low, total[tile][2]);
        if (!EVEN_COLUMNS) {
            total[tile][1] = fmaf(sum[tile][1], unit * high, total[tile][1]);
            total[tile][3] = fmaf(sum[tile][3], unit * high, total[tile][3]);
        }
    }
}

// ---- weights -------------------------------------------------------------------------------------------------------

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
        scale_tile_bytes = FORMAT == FP8 ? (columns + 127) / 128 * 4 : loads * Stage<FORMAT>::CHUNK_SCALE;
        scale_matrix_bytes = (FORMAT == FP8 ? (rows + 127) / 128 : tiles) * scale_tile_bytes;
    }

    __device__ __forceinline__ int stages() const { return (loads + STAGE_LOADS - 1) / STAGE_LOADS; }

    __device__ __forceinline__ void fetch(unsigned slot, const char* data, const char* scale, int matrix, int tile,
                                          int stage, int lane) const {
        data += size_t(unsigned(matrix)) * matrix_bytes + (tile * tile_bytes + stage * STAGE_DATA);
        if (FORMAT == FP8)
            scale += size_t(unsigned(matrix)) * scale_matrix_bytes + ((tile >> 3) * scale_tile_bytes + stage * 4);
        else if (FORMAT != BF16)
            scale += size_t(unsigned(matrix)) * scale_matrix_bytes +
                     (tile * scale_tile_bytes + stage * (STAGE_LOADS * Stage<FORMAT>::CHUNK_SCALE));
        stage_fetch<FORMAT, TAILS>(slot, data, scale, lane, loads - stage * STAGE_LOADS);
    }

};

// ---- routes --------------------------------------------------------------------------------------------------------

// The distinct experts of the step in ascending order ("slots"), and which tokens go to them. In h, the rows of the shared
// expert (all tokens) come first, then those of each slot, ascending tokens.
struct Routes {
    unsigned members[MAX_EXPERT_WORDS];
    int ids[MAX_ENTRIES], experts[MAX_ENTRIES], first_row[MAX_ENTRIES];
    unsigned mask[MAX_ENTRIES];
    float entry_weight[MAX_ENTRIES];
    float weight[MAX_ENTRIES][MAX_TOKENS];
    // 1 / (what h of a token is multiplied with so that it fits into f16)
    float unscale[MAX_TOKENS];
    int count;
};

// Constants only: runs before pdl_wait.
__device__ __forceinline__ void routes_clear(Routes& routes) {
    for (int i = threadIdx.x; i < MAX_ENTRIES; i += THREADS) {
        routes.experts[i] = -1;
        routes.mask[i] = 0;
        if (i < MAX_EXPERT_WORDS) routes.members[i] = 0;
    }
}

// The power of two that brings `bound` into [2^14, 2^15).
__device__ __forceinline__ float f16_factor(float bound) { return __uint_as_float(activation_factor(bound)); }

// One entry of ids_TP and weights_TP per thread.
struct Entry {
    int64 id;
    float weight;

    __device__ __forceinline__ Entry(const int64* ids_TP, const float* weights_TP, int entries) : id(-1), weight(0.0f) {
        if (int(threadIdx.x) >= entries) return;
        id = __ldcg(ids_TP + threadIdx.x);
        weight = __ldcg(weights_TP + threadIdx.x);
    }

    __device__ __forceinline__ void store(Routes& routes, int entries, int X) const {
        if (int(threadIdx.x) >= entries) return;
        const bool valid = id >= 0 && id < X;
        routes.ids[threadIdx.x] = valid ? int(id) : -1;
        routes.entry_weight[threadIdx.x] = weight;
        if (valid) atomicOr(&routes.members[id >> 5], 1u << (id & 31));
    }
};

// After a barrier that follows Entry::store. |h| of a token is at most limit^2 times the sum of its weights.
__device__ __forceinline__ void routes_build(Routes& routes, int T, int P, float limit) {
    const int i = threadIdx.x;
    const int id = i < T * P ? routes.ids[i] : -1;
    if (id >= 0) {
        const auto repeats = [&](int entry) {
            for (int j = entry / P * P; j < entry; ++j)
                if (routes.ids[j] == routes.ids[entry]) return routes.ids[entry] >= 0;
            return false;
        };
        int slot = __popc(routes.members[id >> 5] & ((1u << (id & 31)) - 1));
        for (int word = 0; word < id >> 5; ++word) slot += __popc(routes.members[word]);
        if (repeats(i)) {
            // An expert that a token lists again counts, and rounds, again: in a slot of its own behind all others.
            slot = 0;
            for (int word = 0; word < MAX_EXPERT_WORDS; ++word) slot += __popc(routes.members[word]);
            for (int j = 0; j < i; ++j) slot += repeats(j);
        }
        routes.weight[slot][i / P] = routes.entry_weight[i];
        atomicOr(&routes.mask[slot], 1u << (i / P));
        atomicMax(&routes.experts[slot], id);
    }
    if (i < T) {
        float total = 0.0f;
        for (int p = 0; p < P; ++p) total += fabsf(routes.entry_weight[i * P + p]);
        routes.unscale[i] = ANY_F16 ? 1.0f / f16_factor(limit * fmaxf(limit, 1.0f) * fmaxf(total, 1.0f)) : 1.0f;
    }
}

// After a barrier that follows routes_build; the caller puts another barrier behind it.
__device__ __forceinline__ void routes_finish(Routes& routes, int T) {
    if (threadIdx.x < WARP) {
        int row = T, count = 0;
        for (int base = 0; base < MAX_ENTRIES; base += WARP) {
            const int slot = base + threadIdx.x;
            const int rows = __popc(routes.mask[slot]);
            int sum = rows;
#pragma unroll
            for (int offset = 1; offset < WARP; offset *= 2) {
                const int other = __shfl_up_sync(~0u, sum, offset);
                if (int(threadIdx.x) >= offset) sum += other;
            }
            routes.first_row[slot] = row + sum - rows;
            row += __shfl_sync(~0u, sum, WARP - 1);
            const unsigned used = __ballot_sync(~0u, rows > 0);
            count += __popc(used);
            if (used != ~0u) break;
        }
        if (threadIdx.x == 0) routes.count = count;
    }
}

// ---- sums over the warps of a block --------------------------------------------------------------------------------

struct Partials {
    float* data;
    unsigned full, empty;

    __device__ __forceinline__ static int buffer(int item) { return item % BUFFERS; }
    __device__ __forceinline__ static unsigned parity(int item) { return item / BUFFERS & 1; }
    __device__ __forceinline__ static bool mine(int item, int warp) { return item % WARPS == warp; }

    __device__ __forceinline__ void put(int item, const float (&total)[2][4], int warp, int lane) const {
        if (item >= BUFFERS) barrier_wait(empty + 8 * buffer(item), parity(item) ^ 1);
        float* to = data + (buffer(item) * WARPS + warp) * PARTIAL + (lane >> 2);
        const int t = lane & 3;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            float* rows = to + tile * TOKENS * 16;
            if (EVEN_COLUMNS) {
                if (t < TOKENS) {
                    rows[t * 16] = total[tile][0];
                    rows[t * 16 + 8] = total[tile][2];
                }
            } else {
                rows[2 * t * 16] = total[tile][0];
                rows[2 * t * 16 + 16] = total[tile][1];
                rows[2 * t * 16 + 8] = total[tile][2];
                rows[2 * t * 16 + 24] = total[tile][3];
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(full + 8 * buffer(item));
    }

    __device__ __forceinline__ void begin_get(int item) const { barrier_wait(full + 8 * buffer(item), parity(item)); }

    // Lane = row of the two tiles (0..31); sum over the warps for one token.
    __device__ __forceinline__ float get(int item, int token, int lane) const {
        const float* from = data + buffer(item) * WARPS * PARTIAL + (lane >> 4) * TOKENS * 16 + token * 16 + (lane & 15);
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += from[warp * PARTIAL];
        return sum;
    }

    __device__ __forceinline__ void end_get(int item, int lane) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * buffer(item));
    }
};

// ---- gate and up ---------------------------------------------------------------------------------------------------

// Exact n / divisor for n · divisor < 2^32.
struct Divisor {
    unsigned reciprocal;

    __device__ __forceinline__ explicit Divisor(int divisor) {
        // 0 stands for 2^32.
        reciprocal = divisor > 1 ? 0xFFFFFFFFu / divisor + 1 : 0;
    }

    __device__ __forceinline__ int divide(int n) const { return reciprocal ? __umulhi(n, reciprocal) : n; }
};

// The items of a block: first its share of the shared expert's tiles, then routed tiles. The routed ones are dealt in
// rounds, so that all blocks get nearly equal bytes: blocks that have one shared tile more ("late") sit out the first
// `skipped` + 1 rounds, about as long as their extra tile takes.
struct GateUpItems {
    int number, tile, slot, stage;
    int tiles, shared_tiles, shared_stages, routed_stages;
    int routed_items, late, first, skipped;
    Divisor by_tiles;

    __device__ __forceinline__ GateUpItems(int row_tiles, int shared_n, int routed_n, int shared_bytes, int routed_bytes,
                                           int warp)
        : by_tiles(row_tiles) {
        const int blocks = gridDim.x, block = blockIdx.x;
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
        tile = blockIdx.x + number * gridDim.x;
        if (round >= 0) {
            // In early rounds the late blocks take nothing.
            const int item = first + round * int(gridDim.x) - (skipped < 0 ? 0 : min(round, skipped) * late);
            slot = item < routed_items ? by_tiles.divide(item) : MAX_ENTRIES;
            tile = item - slot * tiles;
        }
    }

    __device__ __forceinline__ bool active() const { return slot < MAX_ENTRIES; }
    __device__ __forceinline__ int stages() const { return slot < 0 ? shared_stages : routed_stages; }

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
    if (E % 8 == 0) {
        if (k < E) raw = __ldcg(reinterpret_cast<const uint4*>(row + k));
        return raw;
    }
    unsigned word[4] = {0, 0, 0, 0};
    for (int i = 0; i < 8; ++i)
        if (k + i < E)
            word[i / 2] |= unsigned(__ldcg(reinterpret_cast<const unsigned short*>(row) + k + i)) << (16 * (i & 1));
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ float largest8(const uint4& raw) {
    float value = 0.0f;
    const unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) value = fmaxf(value, fmaxf(fabsf(bf16_low(word[i])), fabsf(bf16_high(word[i]))));
    return value;
}

// Eight consecutive k (from a multiple of 8) of a token, in B fragment order: four 32-bit words, 16 bytes apart.
__device__ __forceinline__ void store_fragments(char* to, const uint4& raw, int token, int k, int tokens, float factor,
                                                bool as_f16) {
    char* at = to + ((k >> 5) * tokens + token) * 64 + (k >> 3 & 3) * 4;
    const unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int t = 0; t < 4; ++t)
        *reinterpret_cast<unsigned*>(at + 16 * t) =
            as_f16 ? pack_f16(bf16_low(word[t]) * factor, bf16_high(word[t]) * factor) : word[t];
}

// Columns of the staged activations: whole stages, zeros behind the end.
__device__ __forceinline__ int stage_padded(int columns) {
    return TAILS ? (columns + STAGE_COLUMNS - 1) / STAGE_COLUMNS * STAGE_COLUMNS : columns;
}

// Activations of the step in shared memory, once per 16-bit type that a weight format needs.
struct Inputs {
    char *f16, *bf16_rows;
    // [token][warp] largest magnitudes.
    float* largest;

    // x of one token is kept in registers between its two uses.
    static constexpr int KEEP = TOKENS == 1 ? (1024 + THREADS - 1) / THREADS : 0;

    // `meanwhile` runs once, behind the first loads.
    template <class Work>
    __device__ __forceinline__ void stage(const bf16* x_TE, int T, int E, float* unscale, const Work& meanwhile) const {
        const int vectors = stage_padded(E) / 8, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const bool kept = KEEP > 0 && vectors <= KEEP * THREADS;
        uint4 raw[KEEP > 0 ? KEEP : 1];
        if (!kept) meanwhile();
        for (int token = 0; token < T; ++token) {
            const bf16* row = x_TE + size_t(token) * E;
            float value = 0.0f;
            if (kept) {
#pragma unroll
                for (int i = 0; i < KEEP; ++i) {
                    const int vector = threadIdx.x + i * THREADS;
                    raw[i] = vector < vectors ? load_row8(row, vector * 8, E) : make_uint4(0, 0, 0, 0);
                }
                meanwhile();
#pragma unroll
                for (int i = 0; i < KEEP; ++i) value = fmaxf(value, largest8(raw[i]));
            } else {
#pragma unroll 4
                for (int vector = threadIdx.x; vector < vectors; vector += THREADS)
                    value = fmaxf(value, largest8(load_row8(row, vector * 8, E)));
            }
            value = warp_max(value);
            if (lane == 0) largest[token * WARPS + warp] = value;
        }
        __syncthreads();
        for (int token = 0; token < T; ++token) {
            const bf16* row = x_TE + size_t(token) * E;
            float value = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) value = fmaxf(value, largest[token * WARPS + i]);
            const float factor = f16_factor(value);
            if (threadIdx.x == 0) unscale[token] = 1.0f / factor;
            if (kept) {
#pragma unroll
                for (int i = 0; i < KEEP; ++i) {
                    const int vector = threadIdx.x + i * THREADS;
                    if (vector < vectors) store(raw[i], token, vector * 8, T, factor);
                }
            } else {
#pragma unroll 4
                for (int vector = threadIdx.x; vector < vectors; vector += THREADS)
                    store(load_row8(row, vector * 8, E), token, vector * 8, T, factor);
            }
        }
    }

    __device__ __forceinline__ void store(const uint4& raw, int token, int k, int T, float factor) const {
        if (ANY_F16) store_fragments(f16, raw, token, k, T, factor, true);
        if (ANY_BF16) store_fragments(bf16_rows, raw, token, k, T, factor, false);
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
__device__ __forceinline__ void write_hidden(const Partials& partials, int item, const Routes& routes, const float* unscale,
                                             float global_scale, unsigned mask, int slot, int tile, char* h, int T, int F,
                                             float limit, int lane) {
    const int rows = __popc(mask), padded = (F + 63) / 64 * 64, k = tile * 16 + (lane & 15);
    char* to = h + size_t(slot < 0 ? 0 : routes.first_row[slot]) * padded * 2 + size_t(k >> 5) * rows * 64 +
               (k >> 1 & 3) * 16 + (k >> 3 & 3) * 4 + (k & 1) * 2;
    for (int token = 0; token < T; ++token) {
        if (!(mask >> token & 1)) continue;
        float value = partials.get(item, token, lane) * global_scale;
        if (FORMAT != BF16) value *= unscale[token];
        const float up = __shfl_xor_sync(~0u, value, 16);
        const float weight = slot < 0 ? 1.0f : routes.weight[slot][token];
        const bf16 hidden = __float2bfloat16_rn(clamped_swiglu(value, up, weight, limit));
        if (lane < 16) {
            if (FORMAT == BF16) *reinterpret_cast<bf16*>(to) = hidden;
            else *reinterpret_cast<__half*>(to) = __float2half_rn(__bfloat162float(hidden) / routes.unscale[token]);
        }
        to += 64;
    }
}

// Columns of the MMA: which token a lane feeds (B fragment).
__device__ __forceinline__ int lane_token(int lane) { return TOKENS == 1 ? 0 : EVEN_COLUMNS ? lane >> 3 : lane >> 2; }

// ---- down ----------------------------------------------------------------------------------------------------------

// The stages of all 32-row pairs of the output form one line, the shared expert first within a pair; each of `sharers`
// blocks takes an equal, contiguous share of it. One item is what such a share has of one pair.
__device__ __forceinline__ unsigned sharers(int pairs, int stages_per_pair) {
    // A pair that is cut costs an exchange between blocks at the very end: not for a few idle multiprocessors.
    if (pairs <= int(gridDim.x) && pairs * 20 >= int(gridDim.x) * 19) return pairs;
    return min(unsigned(pairs * stages_per_pair), gridDim.x);
}

struct DownItems {
    int position, end, total, pair, first, stages, stage;

    __device__ __forceinline__ DownItems(int pairs, int stages_per_pair, int warp) {
        total = stages_per_pair, stage = warp;
        const unsigned all = pairs * total, count = sharers(pairs, total), share = min(blockIdx.x, count);
        position = share * all / count;
        end = min(share + 1, count) * all / count;
        pair = position / total;
        first = position - pair * total;
        stages = min(total - first, end - position);
    }

    __device__ __forceinline__ bool active() const { return position < end; }

    __device__ __forceinline__ void next_item() {
        position += stages;
        ++pair;
        first = 0;
        stages = min(total, end - position);
    }

    __device__ __forceinline__ void settle() {
#pragma unroll 1
        while (active() && stage >= stages) {
            stage -= stages;
            next_item();
        }
    }
};

// The block whose share of all stages contains stage `position`.
__device__ __forceinline__ int block_of(int position, int pairs, int total) {
    return (unsigned(position + 1) * sharers(pairs, total) - 1) / unsigned(pairs * total);
}

// Every block arrives and waits for all others. All blocks must be resident: one per multiprocessor, and nothing else
// that waits for this grid. What threads wrote before is visible behind it. Launches take counters[0] and counters[1] in
// turn, by the parity of counters[2], their number; one of them clears the other's, which nobody reads any more.
struct GridBarrier {
    int* counters;
    int launch;

    GridBarrier() = default;

    // After pdl_wait.
    __device__ __forceinline__ explicit GridBarrier(int* memory) : counters(memory), launch(0) {
        if (threadIdx.x == 0) launch = __ldcg(memory + 2);
    }

    __device__ __forceinline__ void wait() const { grid_wait(counters, launch); }

    static __device__ __forceinline__ void grid_wait(int* counters, int launch) {
        __syncthreads();
        if (threadIdx.x == 0) {
            int* counter = counters + (launch & 1);
            asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
            const long long start = clock64();
            int arrived;
            do {
                asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
                // Some seconds: another block died or never got a multiprocessor.
                if (clock64() - start > 10000000000ll) __trap();
            } while (arrived < int(gridDim.x));
            if (blockIdx.x == 0) {
                counters[1 - (launch & 1)] = 0;
                counters[2] = launch + 1;
            }
        }
        __syncthreads();
    }
};

// counters: three of the barrier, one per 32 output rows. parts_workspace: [pairs + blocks, T, 32].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_decode(const bf16* x_TE, const int64* ids_TP, const float* weights_TP, const char* r1_data, const char* r1_scale,
               const float* r1_global, const char* r3_data, const char* r3_scale, const float* r3_global,
               const char* r2_data, const char* r2_scale, const float* r2_global, const char* s1_data,
               const char* s1_scale, const float* s1_global, const char* s3_data, const char* s3_scale,
               const float* s3_global, const char* s2_data, const char* s2_scale, const float* s2_global, char* h,
               bf16* y_TE, float* parts_workspace, int* counters, int T, int P, int X, int E, int F, float limit) {
    constexpr int HIDDEN_BYTES = TOKENS * STAGE_COLUMNS * 2;
    extern __shared__ __align__(128) char dynamic_shared[];
    __shared__ Routes routes;
    __shared__ float units[MAX_ENTRIES + 1];
    __shared__ unsigned long long barriers[2 * BUFFERS];
    __shared__ float largest[MAX_TOKENS * WARPS], unscale[MAX_TOKENS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    float* partial_data = reinterpret_cast<float*>(dynamic_shared + WARPS * STAGES * PAIR_BYTES);
    // x in phase 1, the rings of h in phase 2.
    char* after = reinterpret_cast<char*>(partial_data + BUFFERS * WARPS * PARTIAL);
    const Inputs inputs = {after, after + (ANY_F16 ? T * stage_padded(E) * 2 : 0), largest};
    const unsigned ring = shared_address(dynamic_shared) + warp * STAGES * PAIR_BYTES;
    const unsigned full = shared_address(barriers), empty = full + 8 * BUFFERS;

    const Partials partials = {partial_data, full, empty};
    GridBarrier grid_barrier;

    // Phase 1
    int first_item;
    {
        const Layout<ROUTED> routed(F, E);
        const Layout<SHARED> shared(F, E);
        const int tiles = (F + 63) / 64 * 4;
        GateUpItems producer(tiles, shared.stages(), routed.stages(), shared.tile_bytes + shared.scale_tile_bytes,
                             routed.tile_bytes + routed.scale_tile_bytes, warp);
        GateUpItems items = producer;
        const auto issue = [&](int place) {
            const unsigned slot = ring + place * PAIR_BYTES;
            if (producer.slot < 0) {
                shared.fetch(slot, s1_data, s1_scale, 0, producer.tile, producer.stage, lane);
                shared.fetch(slot + Stage<SHARED>::BYTES, s3_data, s3_scale, 0, producer.tile, producer.stage, lane);
            } else {
                const int expert = routes.experts[producer.slot];
                routed.fetch(slot, r1_data, r1_scale, expert, producer.tile, producer.stage, lane);
                routed.fetch(slot + Stage<ROUTED>::BYTES, r3_data, r3_scale, expert, producer.tile, producer.stage, lane);
            }
            producer.stage += WARPS;
            producer.settle();
        };
        int issued = 0;
        producer.settle();
#pragma unroll 1
        for (; issued < STAGES && producer.active(); ++issued) {
            issue(issued);
            cp_async_commit();
        }
        routes_clear(routes);
        if (threadIdx.x < BUFFERS) {
            barrier_init(full + 8 * threadIdx.x, WARPS);
            barrier_init(empty + 8 * threadIdx.x, 1);
        }
        barrier_fence();
        __syncthreads();

        pdl_wait();
        grid_barrier = GridBarrier(counters);
        const Entry entry(ids_TP, weights_TP, T * P);
        inputs.stage(x_TE, T, E, unscale, [&] { entry.store(routes, T * P, X); });
        routes_build(routes, T, P, limit);
        __syncthreads();
        routes_finish(routes, T);
        __syncthreads();
        producer.start_routed(routes.count * tiles);
        producer.settle();
        items.start_routed(routes.count * tiles);
#pragma unroll 1
        for (; issued < STAGES; ++issued) {
            if (producer.active()) issue(issued);
            cp_async_commit();
        }

        const int token = min(lane_token(lane), T - 1);
        const unsigned lane_address = token * 64 + (lane & 3) * 16;
        const unsigned x_f16 = shared_address(inputs.f16) + lane_address;
        const unsigned x_bf16 = shared_address(inputs.bf16_rows) + lane_address;
        const auto finish = [&](int number) {
            if (number < 0 || !Partials::mine(number, warp)) return;
            GateUpItems past = items;
            past.number = number;
            past.place();
            const bool is_shared = past.slot < 0;
            // Up and gate rows may have different global scales.
            const float* shared_global = lane < 16 ? s1_global : s3_global;
            const float* routed_global = lane < 16 ? r1_global : r3_global;
            float global_scale = is_shared ? format_factor<SHARED>() : format_factor<ROUTED>();
            if (is_shared && SHARED == NVFP4) global_scale *= __ldg(shared_global);
            if (!is_shared && ROUTED == NVFP4) global_scale *= __ldg(routed_global + routes.experts[past.slot]);
            partials.begin_get(number);
            if (is_shared)
                write_hidden<SHARED>(partials, number, routes, unscale, global_scale, (1u << T) - 1, -1, past.tile, h, T,
                                     F, limit, lane);
            else
                write_hidden<ROUTED>(partials, number, routes, unscale, global_scale, routes.mask[past.slot], past.slot,
                                     past.tile, h, T, F, limit, lane);
            partials.end_get(number, lane);
        };
        int place = 0;
#pragma unroll 1
        while (items.active()) {
            float total[2][4] = {};
            const int stages = items.stages();
            const bool is_shared = items.slot < 0;
#pragma unroll 1
            for (; items.stage < stages; items.stage += WARPS) {
                const unsigned slot = ring + place * PAIR_BYTES;
                cp_async_wait<STAGES - 1>();
                __syncwarp();
                if (is_shared) {
                    const unsigned x = SHARED == BF16 ? x_bf16 : x_f16;
                    multiply_stage<SHARED>(total, slot, {x + items.stage * (Stage<SHARED>::COLUMNS * 2) * T, T * 64, true},
                                           1.0f, 1.0f, lane);
                } else {
                    const unsigned x = ROUTED == BF16 ? x_bf16 : x_f16;
                    multiply_stage<ROUTED>(total, slot, {x + items.stage * (Stage<ROUTED>::COLUMNS * 2) * T, T * 64, true},
                                           1.0f, 1.0f, lane);
                }
                __syncwarp();
                if (producer.active()) issue(place);
                cp_async_commit();
                if (++place == STAGES) place = 0;
            }
            items.stage -= stages;

            // The item before is finished now, when no warp is likely to be behind in it: waiting here would add up.
            partials.put(items.number, total, warp, lane);
            finish(items.number - 1);
            items.next_item();
        }
        finish(items.number - 1);
        first_item = items.number;
    }

    // Phase 2
    pdl_launch();
    {
        for (int i = threadIdx.x; i <= routes.count; i += THREADS) {
            if (i == 0)
                units[0] = format_factor<SHARED>() * (SHARED == NVFP4 ? __ldg(s2_global) : 1.0f);
            else
                units[i] = format_factor<ROUTED>() * (ROUTED == NVFP4 ? __ldg(r2_global + routes.experts[i - 1]) : 1.0f);
        }

        const Layout<ROUTED> routed(E, F);
        const Layout<SHARED> shared(E, F);
        const int routed_stages = routed.stages(), shared_stages = shared.stages();
        const Divisor by_routed_stages(routed_stages);
        const unsigned hidden_ring = shared_address(after) + warp * STAGES * HIDDEN_BYTES;
        const int pairs = (E + 63) / 64 * 2, hidden_k32 = (F + 63) / 64 * 2;

        // Slot of a position in the concatenated list of stages (-1: the shared expert), and the stage inside it.
        const auto locate = [&](int position, int& stage) {
            stage = position;
            if (position < shared_stages) return -1;
            position -= shared_stages;
            const int slot = by_routed_stages.divide(position);
            stage = position - slot * routed_stages;
            return slot;
        };
        const auto fetch_weights = [&](const DownItems& from, int place) {
            const unsigned to = ring + place * PAIR_BYTES;
            int stage;
            const int slot = locate(from.first + from.stage, stage);
            if (slot < 0) {
                shared.fetch(to, s2_data, s2_scale, 0, 2 * from.pair, stage, lane);
                shared.fetch(to + Stage<SHARED>::BYTES, s2_data, s2_scale, 0, 2 * from.pair + 1, stage, lane);
            } else {
                const int expert = routes.experts[slot];
                routed.fetch(to, r2_data, r2_scale, expert, 2 * from.pair, stage, lane);
                routed.fetch(to + Stage<ROUTED>::BYTES, r2_data, r2_scale, expert, 2 * from.pair + 1, stage, lane);
            }
        };
        const auto fetch_hidden = [&](const DownItems& from, int place) {
            int stage;
            const int slot = locate(from.first + from.stage, stage);
            const int rows = TOKENS == 1 ? 1 : slot < 0 ? T : __popc(routes.mask[slot]);
            const int k32 = (slot < 0 ? Stage<SHARED>::COLUMNS : Stage<ROUTED>::COLUMNS) / 32, units_here = k32 * rows * 4;
            const int first_row = slot < 0 ? 0 : routes.first_row[slot];
            const char* source = h + (size_t(first_row) * hidden_k32 + size_t(stage) * k32 * rows) * 64;
            const unsigned to = hidden_ring + place * HIDDEN_BYTES;
            const int exist = TAILS ? (hidden_k32 - stage * k32) * rows * 4 : units_here;
#pragma unroll 1
            for (int unit = lane; unit < units_here; unit += WARP) {
                if (TAILS && unit >= exist) cp_async16(to + unit * 16, h, 0);
                else cp_async16(to + unit * 16, source + unit * 16);
            }
        };

        DownItems producer(pairs, shared_stages + routes.count * routed_stages, warp);
        DownItems items = producer;
        producer.settle();
        DownItems prefetched = producer;
#pragma unroll 1
        for (int i = 0; i < STAGES && producer.active(); ++i) {
            fetch_weights(producer, i);
            producer.stage += WARPS;
            producer.settle();
        }
        cp_async_commit();
        grid_barrier.wait();
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) {
            if (prefetched.active()) {
                fetch_hidden(prefetched, i);
                prefetched.stage += WARPS;
                prefetched.settle();
            }
            cp_async_commit();
        }
        const int token = lane_token(lane);
        // Hidden rows of BF16 experts are not scaled; the sums are, when other experts' rows are.
        const int column = EVEN_COLUMNS ? min(lane & 3, T - 1) : min(2 * (lane & 3), T - 1);
        const float low = ANY_BF16 ? 1.0f / routes.unscale[column] : 1.0f;
        const float high = ANY_BF16 ? 1.0f / routes.unscale[EVEN_COLUMNS ? column : min(column + 1, T - 1)] : 1.0f;
        int place = 0, number = first_item;
#pragma unroll 1
        while (items.active()) {
            float total[2][4] = {};
#pragma unroll 1
            for (; items.stage < items.stages; items.stage += WARPS) {
                const unsigned at = ring + place * PAIR_BYTES;
                int stage;
                const int slot = locate(items.first + items.stage, stage);
                const unsigned mask = slot < 0 || TOKENS == 1 ? (1u << T) - 1 : routes.mask[slot];
                const int rank = TOKENS == 1 ? 0 : __popc(mask & ((1u << token) - 1));
                const Activations x = {hidden_ring + place * HIDDEN_BYTES + rank * 64 + (lane & 3) * 16, __popc(mask) * 64,
                                       (mask >> token & 1) != 0};
                const float unit = units[slot + 1];
                cp_async_wait<STAGES - 1>();
                __syncwarp();
                if (slot < 0)
                    multiply_stage<SHARED>(total, at, x, SHARED == BF16 ? low : unit, SHARED == BF16 ? high : unit, lane);
                else
                    multiply_stage<ROUTED>(total, at, x, ROUTED == BF16 ? low : unit, ROUTED == BF16 ? high : unit, lane);
                __syncwarp();
                if (producer.active()) {
                    fetch_weights(producer, place);
                    fetch_hidden(producer, place);
                    producer.stage += WARPS;
                    producer.settle();
                }
                cp_async_commit();
                if (++place == STAGES) place = 0;
            }
            items.stage -= items.stages;

            partials.put(number, total, warp, lane);
            if (Partials::mine(number, warp)) {
                const int pair = items.pair, row = pair * 32 + lane;
                partials.begin_get(number);
                if (items.stages == items.total) {
                    for (int t = 0; t < T; ++t)
                        if (row < E) y_TE[size_t(t) * E + row] = __float2bfloat16_rn(partials.get(number, t, lane) * routes.unscale[t]);
                    partials.end_get(number, lane);
                } else {
                    // The pair is cut: the last of its blocks to finish adds the parts, in the order of K.
                    const int begin = pair * items.total, last = begin + items.total - 1;
                    const int first_block = block_of(begin, pairs, items.total), last_block = block_of(last, pairs, items.total);
                    const auto part = [&](int block) { return parts_workspace + size_t(pair + block) * T * 32 + lane; };
                    for (int t = 0; t < T; ++t) __stcg(part(blockIdx.x) + t * 32, partials.get(number, t, lane));
                    partials.end_get(number, lane);
                    __threadfence();
                    __syncwarp();
                    int arrived = 0;
                    if (lane == 0) arrived = atomicAdd(counters + 3 + pair, 1);
                    if (__shfl_sync(~0u, arrived, 0) == last_block - first_block) {
                        __threadfence();
                        if (lane == 0) counters[3 + pair] = 0;
                        for (int t = 0; t < T; ++t) {
                            float sum = 0.0f;
#pragma unroll 4
                            for (int block = first_block; block <= last_block; ++block) sum += __ldcg(part(block) + t * 32);
                            if (row < E) y_TE[size_t(t) * E + row] = __float2bfloat16_rn(sum * routes.unscale[t]);
                        }
                    }
                }
            }
            ++number;
            items.next_item();
        }
    }
}
