// Attention of a few tokens (dsv4/ops/attention/__init__.py): flash-decoding in one launch, for
// rows of 512 values.
//
// A cluster of blocks serves 16 heads of one token; its blocks split the keys and merge through
// distributed shared memory. With many keys several clusters (SPLITS) do, and the last of them to
// finish merges their results. All heads share one row per key, which is both key and value, so a
// block gathers each of its rows once, as stored, and dequantizes it in registers on the way into
// the tensor cores, once for q·k and once for p·v:
//   - The row is 8 groups of 64 values. A KV_FP8 row has 7 of e4m3 with a scale each, and one of
//     bf16 (rotary).
//   - q·k: a warp takes two groups and half of the keys. Per group the codes are multiplied as f16,
//     exactly, and the scale is applied to the float32 sum. The four partial sums of a logit meet
//     in shared memory.
//   - p·v: a warp takes one group of all keys. The scale is applied to p, relative to the largest
//     scale of the tile.
// bf16 groups use bf16 products and weights. Dimensions and keys are dealt to the lanes such that
// every shared memory access is conflict-free 8 or 16 bytes; the order inside a sum is arbitrary.
//
// Slots that no token may see are never read; rows that fill a tile up are zero.
#include "kv_rows.cuh"
#include "ptx.cuh"
#include "rope.cuh"
#include <math_constants.h>

#ifndef FORMAT  // ROW_KV_FP8 or ROW_BF16
#define FORMAT ROW_KV_FP8
#endif
#ifndef LISTED  // 1: compressed entries come from a list, 0: all complete ones
#define LISTED 1
#endif
#ifndef CLUSTER  // blocks that share the keys of 16 heads
#define CLUSTER 8
#endif
#ifndef TILE  // rows in a stage
#define TILE 80
#endif
// 1: a block has at most TILE keys; they are multiplied in chunks, as they arrive. 2: any number
#ifndef STAGES
#define STAGES 2
#endif
#ifndef WARPS  // 8 or 16
#define WARPS 8
#endif
#ifndef SPLITS  // clusters that share the keys of 16 heads when there are more than SPLIT_KEYS
#define SPLITS 1
#endif
#ifndef SPLIT_KEYS
#define SPLIT_KEYS 2048
#endif
// 1: the next kernel may start when the rows are there, not at once; with a list and one stage
#ifndef ROWS_FIRST
#define ROWS_FIRST 0
#endif
// Clusters that run at once. Further ones start when others have ended, and with them what came
// before: they let the next kernel start before they look for their rows
#ifndef WAVE
#define WAVE 14
#endif
// 1: every token sees what the last one sees (dsv4/ops/attention/block.py)
#ifndef AS_LAST
#define AS_LAST 0
#endif

namespace {

constexpr int DIM = 512;
constexpr int ROTARY = 64;
constexpr int HEADS = 16;
constexpr int THREADS = WARPS * WARP;
// Warps that share a group of 64 values in p·v, or a fourth of q·k and half the keys.
constexpr int SPLIT = WARPS / 8;
constexpr int NTILES = 8 / SPLIT;  // n-tiles of a warp in p·v
constexpr int CHUNKS = STAGES == 1 ? (TILE + 79) / 80 : 1;
constexpr int CHUNK = TILE / CHUNKS;  // rows that are awaited together
constexpr bool FP8 = FORMAT == ROW_KV_FP8;
// Whether rows that earlier steps have written are asked for before the kernel in front has ended:
// what a list says is known behind it alone.
constexpr bool EARLY = !LISTED;
constexpr int ROW_BYTES = FP8 ? 576 : 1024;
constexpr int SCALE_BYTES = 8;
// Rows r and r + 2 lie 64 bytes apart modulo the 128 of a shared memory access, four neighbours 32
// bytes apart.
constexpr int PITCH = ROW_BYTES + 32;
constexpr int LOGIT_PITCH = TILE + 8;                           // floats
constexpr int WEIGHT_PITCH = (2 * TILE + 127) / 128 * 64 + 16;  // halves
constexpr int PIECE = 8;                         // values that are merged together: 16 bytes of f16
constexpr int PIECES = 4 * NTILES / PIECE;       // of a thread
constexpr int SLOTS = WARPS * PIECES / CLUSTER;  // pieces per lane that a block finishes
constexpr int OUT = SLOTS * WARP * PIECE / THREADS;  // values that a thread finishes
constexpr float QUERY_SCALE = 0.0625f;               // room in f16 for queries up to 2^20
constexpr int QUERY_LOG2 = 4;                        // taken back with the block scale
// Softmax weights are kept times 2^10, far from the subnormals of f16
constexpr int WEIGHT_LOG2 = 10;
// Half of the registers where two blocks also have room in shared memory.
constexpr int BLOCKS_PER_SM = STAGES == 1 && WARPS == 8 && TILE <= 80 ? 2 : 1;
static_assert(CHUNK % 16 == 0 && CHUNK * CHUNKS == TILE, "unsupported shape");
static_assert(SLOTS * CLUSTER == WARPS * PIECES && OUT % 2 == 0 && OUT <= PIECE,
              "unsupported shape");
static_assert(!ROWS_FIRST || (LISTED && STAGES == 1), "unsupported shape");
static_assert((SPLIT == 1 || SPLIT == 2) && (STAGES == 1 || STAGES == 2), "unsupported shape");

struct Shared {
    unsigned char rows[STAGES][TILE * PITCH];
    float logits[4][HEADS][LOGIT_PITCH];
    __half weights[FP8 ? HEADS : 1][WEIGHT_PITCH];  // for e4m3 groups
    bf16 weights_bf16[HEADS][WEIGHT_PITCH];         // for bf16 groups
    __half factors[8][TILE];  // block scale of a column relative to the largest, by group
    // What the blocks of the cluster, this one too, have sent to this block: its pieces of their
    // results (f16), the power of two to multiply them with, and the maximum and sum of every head.
    uint4 merge[CLUSTER][SLOTS][WARP];
    float2 peak_sum[CLUSTER][HEADS];
    float merge_scale[CLUSTER][SLOTS];
    float rescale[HEADS];
    float sinks[HEADS];  // times log2 e
    Turn turns[ROTARY / 2];
    int counts[WARPS];
    int last, unused;
    unsigned long long merged, unused2;  // mbarrier: what the cluster sends
};

#ifdef SHARED_BYTES
static_assert(sizeof(Shared) == SHARED_BYTES, "the launcher allocates something else");
#endif

// a / b for a non-negative a, in 32 bits where they suffice.
__device__ __forceinline__ int64 divide(int64 a, int b) {
    return (a >> 32) == 0 ? (int64)((unsigned)a / (unsigned)b) : a / b;
}

struct Caches {
    const unsigned char *ring, *ring_scale, *entries, *entry_scale;
    int ring_slots, first_slot, window_keys;  // first_slot: slot of the oldest token in the window
    int rank, ranks;                          // this block among those that share the keys
    int new_window, new_entries;              // the first keys of either kind that this step writes

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

    // How many of `keys` are this block's, when blocks take turns of four.
    __device__ __forceinline__ int share(int keys) const {
        const int rounds = keys / (4 * ranks);
        return 4 * rounds + min(max(keys - (rounds * ranks + rank) * 4, 0), 4);
    }
};

// Copies BYTES, or writes as many zeros. 16-byte copies bypass L1.
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool wanted) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(wanted ? 16 : 0));
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from),
                     "r"(wanted ? 8 : 0));
    }
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                        unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ unsigned bits(__half2 value) {
    return *reinterpret_cast<unsigned*>(&value);
}
__device__ __forceinline__ unsigned bits(__nv_bfloat162 value) {
    return *reinterpret_cast<unsigned*>(&value);
}
__device__ __forceinline__ float2 as_floats_bf16(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Without release, which would be a fence for the whole GPU: barrier_fence() has shown the barrier.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ unsigned remote(unsigned address, unsigned rank) {
    unsigned mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
// Stores into a block of the cluster that count on its mbarrier: it need not wait for the sender,
// only for the bytes.
__device__ __forceinline__ void store_remote(unsigned address, uint4 value, unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void store_remote2(unsigned address, float2 value, unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
            "r"(address),
        "f"(value.x), "f"(value.y), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void store_remote1(unsigned address, float value, unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
            address),
        "f"(value), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Every byte that is waited for has been sent by a block that is running; the bound only turns a
// fault into an error.
__device__ __forceinline__ void mail_wait(unsigned barrier, int parity) {
    for (int tries = 0; tries < 1 << 24; ++tries) {
        int done;
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
            "selp.s32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
        if (done) return;
    }
    __trap();
}
// Waits for rows until PENDING groups of copies are left.
template <int PENDING>
__device__ __forceinline__ void rows_wait() {
    cp_async_wait<PENDING>();
    __syncthreads();
}

// 2^(code - 127 + QUERY_LOG2); NaN for codes beyond float32, which only rows with NaN or infinity
// have.
__device__ __forceinline__ float scale_factor(unsigned code) {
    return __uint_as_float(min((code + QUERY_LOG2) << 23, 0x7fc00000u));
}

// Column x of a logit or weight row is row `tile_row(x)` of the tile, inside blocks of 16. A lane
// of p·v multiplies rows of columns 4q .. 4q + 3: their four neighbours in q have different row %
// 4, columns 2i and 2i + 1 differ by 2 mod 4.
__device__ __forceinline__ int tile_row(int x) {
    const int quarter = (x >> 2) & 3, i = x & 3;
    return (x & ~15) + 4 * i + (quarter ^ (2 * (i & 1)));
}

// The j-th key of block `rank` of `ranks` among all: blocks take turns of four, so that they share
// any prefix evenly.
__device__ __forceinline__ int turn_of(int j, int rank, int ranks) {
    return ((j >> 2) * ranks + rank) * 4 + (j & 3);
}

// Row and scale address of key j of this block. `list`: ring slots as ~slot, entries as they are.
__device__ __forceinline__ void key_address(const Caches& caches, const int* list, int j,
                                            const unsigned char*& row,
                                            const unsigned char*& scale) {
    bool in_ring;
    int slot;
    if constexpr (LISTED) {
        const int code = list[j];
        in_ring = code < 0;
        slot = in_ring ? ~code : code;
    } else {
        const int key = turn_of(j, caches.rank, caches.ranks);
        in_ring = key < caches.window_keys;
        slot = key + (in_ring ? caches.first_slot : -caches.window_keys);
        if (in_ring && slot >= caches.ring_slots) slot -= caches.ring_slots;
    }
    row = (in_ring ? caches.ring : caches.entries) + (int64)slot * ROW_BYTES;
    if constexpr (FP8)
        scale = (in_ring ? caches.ring_scale : caches.entry_scale) + (int64)slot * SCALE_BYTES;
}

// Starts copying keys first .. first + rows - 1 into a stage, but for those that this step writes
// if OLD; zeros up to a multiple of 16 rows. A warp takes 8 rows at a time, 512 bytes of one row
// with each copy.
template <bool OLD>
__device__ __forceinline__ void gather(const Caches& caches, const int* list, unsigned char* stage,
                                       int first, int rows) {
    const int padded = (rows + 15) & ~15;
    const int lane = threadIdx.x % WARP;
    const int part = lane % 4;
    for (int r = threadIdx.x / WARP * 8; r < padded; r += WARPS * 8) {
        const int mine = r + lane / 4;
        const unsigned char *row, *scale;
        key_address(caches, list, first + (mine < rows ? mine : 0), row, scale);
        const bool left_out = OLD && mine < rows &&
                              caches.is_new(turn_of(first + mine, caches.rank, caches.ranks));
        const unsigned gaps = OLD ? __ballot_sync(~0u, left_out) : 0;
        const unsigned to = shared_address(stage) + r * PITCH;
#pragma unroll 4
        for (int i = 0; i < 8; ++i) {
            if (OLD && (gaps >> 4 * i & 1)) continue;
            const unsigned char* from = reinterpret_cast<const unsigned char*>(
                __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), 4 * i));
#pragma unroll
            for (int half = 0; half < ROW_BYTES / 512; ++half) {
                copy_async<16>(to + i * PITCH + half * 512 + lane * 16,
                               from + half * 512 + lane * 16, r + i < rows);
            }
        }
        if (FP8 && !left_out) {
            const unsigned at = to + lane / 4 * PITCH;
            copy_async<16>(at + 512 + part * 16, row + 512 + part * 16, mine < rows);
            if (part == 0) copy_async<8>(at + ROW_BYTES, scale, mine < rows);
        }
    }
}

// Starts copying what gather<true> leaves out: those of this block's keys first .. first + rows - 1
// that the step has written. A warp takes one at a time. `keys`: of the token.
__device__ __forceinline__ void gather_new(const Caches& caches, unsigned char* stage, int first,
                                           int rows, int keys) {
    const int lane = threadIdx.x % WARP;
    const int in_window = caches.window_keys - caches.new_window;
    const int count = in_window + keys - caches.new_entries;
    for (int i = threadIdx.x / WARP; i < count; i += WARPS) {
        const int key = i < in_window ? caches.new_window + i : caches.new_entries + i - in_window;
        const int turn = key >> 2, j = turn / caches.ranks * 4 + (key & 3);
        if (turn % caches.ranks != caches.rank || j < first || j >= first + rows) continue;
        const unsigned char *row, *scale;
        key_address(caches, nullptr, j, row, scale);
        unsigned char* to = stage + (j - first) * PITCH;
        for (int at = lane * 16; at < ROW_BYTES; at += WARP * 16)
            copy_async<16>(shared_address(to + at), row + at, true);
        // Around L1, which may hold what was there when neighbours were asked for.
        if (FP8 && lane == 0)
            *reinterpret_cast<uint2*>(to + ROW_BYTES) =
                __ldcg(reinterpret_cast<const uint2*>(scale));
    }
}

// The A fragments of one group of q for this lane's two heads. A lane of a quad has 16 consecutive
// dimensions where keys are e4m3, and 8 in each half of the group where they are bf16.
struct QueryGroup {
    unsigned a[4][4];

    // Reads the fragments as bf16. `head` is the first of the lane's two; heads that do not exist
    // are zero.
    __device__ __forceinline__ void load(const bf16* q, int group, int head, int heads,
                                         bool codes) {
        const int quad = threadIdx.x % 4;
        const int first = group * 64 + (codes ? 16 : 8) * quad;
        const int second = first + (codes ? 8 : 32);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 low = make_uint4(0, 0, 0, 0), high = low;
            if (head + 8 * half < heads) {
                const bf16* row = q + (head + 8 * half) * DIM;
                low = *reinterpret_cast<const uint4*>(row + first);
                high = *reinterpret_cast<const uint4*>(row + second);
            }
            a[0][half] = low.x, a[0][half + 2] = low.y, a[1][half] = low.z, a[1][half + 2] = low.w;
            a[2][half] = high.x, a[2][half + 2] = high.y, a[3][half] = high.z,
            a[3][half + 2] = high.w;
        }
    }

    // bf16 to f16 times QUERY_SCALE, for e4m3 groups. Apart from load(), so that nothing waits for
    // the queries early.
    __device__ __forceinline__ void to_f16() {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 pair = as_floats_bf16(a[i][j]);
                a[i][j] = bits(__floats2half2_rn(pair.x * QUERY_SCALE, pair.y * QUERY_SCALE));
            }
        }
    }
};

// The B fragments of one group of this lane's key, as stored, and one of the four steps of its
// product.
template <bool CODES>
struct KeyGroup {
    unsigned words[CODES ? 4 : 8];

    __device__ __forceinline__ void load(const unsigned char* group) {
        const uint4 low = *reinterpret_cast<const uint4*>(group + 16 * (threadIdx.x % 4));
        words[0] = low.x, words[1] = low.y, words[2] = low.z, words[3] = low.w;
        if constexpr (!CODES) {
            const uint4 high = *reinterpret_cast<const uint4*>(group + 64 + 16 * (threadIdx.x % 4));
            words[4] = high.x, words[5] = high.y, words[6] = high.z, words[7] = high.w;
        }
    }

    __device__ __forceinline__ void multiply(float (&sum)[4], const QueryGroup& q, int i) const {
        if constexpr (CODES) {
            const uint2 values = e4m3x4_to_f16x4(words[i]);
            mma_f16(sum, q.a[i], values.x, values.y);
        } else {
            mma_bf16(sum, q.a[i], words[2 * i], words[2 * i + 1]);
        }
    }
};

// logits[pair][head][column] = q · k over the two groups of `pair`, for columns first .. padded -
// 1; this warp: columns 8·half .. + 7 of every 16, of every SPLIT-th 16. Two blocks of columns at a
// time, so that four sums are in flight.
template <bool FIRST_CODES, bool SECOND_CODES>
__device__ __forceinline__ void query_key_pair(const unsigned char* stage, const QueryGroup (&q)[2],
                                               Shared& shared, int first_column, int padded) {
    constexpr int STEP = 16 * SPLIT;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int pair = warp / (2 * SPLIT);
    const int half = warp % 2;
    const int part = warp / 2 % SPLIT;
    const int column = 8 * half + 2 * (lane % 4);
    const unsigned char* key =
        stage + tile_row(8 * half + lane / 4) * PITCH + (FP8 ? 128 : 256) * pair;
    const unsigned char* scale0 = stage + tile_row(column) * PITCH + ROW_BYTES + 2 * pair;
    const unsigned char* scale1 = stage + tile_row(column + 1) * PITCH + ROW_BYTES + 2 * pair;
    float* out = &shared.logits[pair][lane / 4][column];
    for (int block = first_column + 16 * part; block < padded; block += 2 * STEP) {
        // Without a second block the first is computed twice.
        const int blocks[2] = {block, block + STEP < padded ? block + STEP : block};
        KeyGroup<FIRST_CODES> first[2];
        KeyGroup<SECOND_CODES> second[2];
        unsigned codes0[2], codes1[2];
        float sums[2][2][4] = {};
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            first[b].load(key + blocks[b] * PITCH);
            second[b].load(key + blocks[b] * PITCH + (FIRST_CODES ? 64 : 128));
            if constexpr (FIRST_CODES) {
                codes0[b] = *reinterpret_cast<const unsigned short*>(scale0 + blocks[b] * PITCH);
                codes1[b] = *reinterpret_cast<const unsigned short*>(scale1 + blocks[b] * PITCH);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                first[b].multiply(sums[b][0], q[0], i);
                second[b].multiply(sums[b][1], q[1], i);
            }
        }
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            float factors[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
            if constexpr (FIRST_CODES) {
                factors[0][0] = scale_factor(codes0[b] & 0xff);
                factors[0][1] = scale_factor(codes1[b] & 0xff);
            }
            if constexpr (SECOND_CODES) {
                factors[1][0] = scale_factor(codes0[b] >> 8);
                factors[1][1] = scale_factor(codes1[b] >> 8);
            }
            float logits[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                logits[i] = sums[b][0][i] * factors[0][i % 2] + sums[b][1][i] * factors[1][i % 2];
            }
            *reinterpret_cast<float2*>(out + blocks[b]) = make_float2(logits[0], logits[1]);
            *reinterpret_cast<float2*>(out + 8 * LOGIT_PITCH + blocks[b]) =
                make_float2(logits[2], logits[3]);
        }
    }
}

__device__ __forceinline__ void query_key(const unsigned char* stage, const QueryGroup (&q)[2],
                                          Shared& shared, int first_column, int padded) {
    if constexpr (FP8) {
        if (threadIdx.x / WARP / (2 * SPLIT) < 3) {
            query_key_pair<true, true>(stage, q, shared, first_column, padded);
        } else {
            query_key_pair<true, false>(stage, q, shared, first_column, padded);
        }
    } else {
        query_key_pair<false, false>(stage, q, shared, first_column, padded);
    }
}

// Running maximum (of logits times log2 e) of one head, and the lane's part of the sum; LANES lanes
// per head.
constexpr int LANES = THREADS / HEADS;

struct Softmax {
    float peak = -CUDART_INF_F, sum = 0.0f;

    // Turns the logits of a tile into weights 2^(logit - peak) and writes them and the factor for
    // what came before.
    __device__ __forceinline__ void tile(Shared& shared, int rows, int padded, float scale_log2) {
        constexpr int STEPS = (TILE + 4 * LANES - 1) / (4 * LANES);
        const int head = threadIdx.x / LANES, column = threadIdx.x % LANES * 4;
        float logits[STEPS][4], highest = -CUDART_INF_F;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int x = column + step * 4 * LANES;
#pragma unroll
            for (int i = 0; i < 4; ++i) logits[step][i] = -CUDART_INF_F;
            if (x >= padded) continue;
            float4 total = *reinterpret_cast<const float4*>(&shared.logits[0][head][x]);
#pragma unroll
            for (int pair = 1; pair < 4; ++pair) {
                const float4 part = *reinterpret_cast<const float4*>(&shared.logits[pair][head][x]);
                total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
            }
            const float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (tile_row(x + i) < rows) logits[step][i] = values[i] * scale_log2;
                highest = fmaxf(highest, logits[step][i]);
            }
        }
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2)
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, offset));
        const float raised = fmaxf(peak, highest);
        const float before = exp2_fast(peak - raised);
        float added = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int x = column + step * 4 * LANES;
            if (x >= padded) continue;
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[i] = exp2_fast(logits[step][i] - raised);
                added += p[i];
                p[i] *= 1 << WEIGHT_LOG2;
            }
            if constexpr (FP8) {
                *reinterpret_cast<uint2*>(&shared.weights[head][x]) = make_uint2(
                    bits(__floats2half2_rn(p[0], p[1])), bits(__floats2half2_rn(p[2], p[3])));
            }
            *reinterpret_cast<uint2*>(&shared.weights_bf16[head][x]) = make_uint2(
                bits(__floats2bfloat162_rn(p[0], p[1])), bits(__floats2bfloat162_rn(p[2], p[3])));
        }
        sum = sum * before + added;
        peak = raised;
        if (column == 0) shared.rescale[head] = before;
    }

    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2)
            sum += __shfl_xor_sync(~0u, sum, offset);
    }
};

// Weights of 16 keys for this lane's two heads, as the A fragment of a product.
template <typename Value>
__device__ __forceinline__ void load_weights(unsigned (&a)[4], const Value (*weights)[WEIGHT_PITCH],
                                             int block) {
    const int lane = threadIdx.x % WARP;
    const uint2 top = *reinterpret_cast<const uint2*>(&weights[lane / 4][block + 4 * (lane % 4)]);
    const uint2 bottom =
        *reinterpret_cast<const uint2*>(&weights[lane / 4 + 8][block + 4 * (lane % 4)]);
    a[0] = top.x, a[1] = bottom.x, a[2] = top.y, a[3] = bottom.y;
}

// sum[j] += p · v for e4m3 values at `group` of every row, of which this warp takes NTILES · 8 from
// `value` on: lane value NTILES · (lane / 4) + j in n-tile j.
__device__ __forceinline__ void weights_codes(float (&sum)[NTILES][4], const unsigned char* stage,
                                              int group, int value, const Shared& shared,
                                              int padded) {
    const int lane = threadIdx.x % WARP, quad = lane % 4;
#pragma unroll 2
    for (int block = 0; block < padded; block += 16) {
        unsigned a[4], codes[4][2];
        load_weights(a, shared.weights, block);
        const uint2 factors =
            *reinterpret_cast<const uint2*>(&shared.factors[group][block + 4 * quad]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned char* row = stage + (block + tile_row(4 * quad + i)) * PITCH;
            const unsigned char* at = row + 64 * group + value + NTILES * (lane / 4);
            if constexpr (NTILES == 8) {
                const uint2 both = *reinterpret_cast<const uint2*>(at);
                codes[i][0] = both.x, codes[i][1] = both.y;
            } else {
                codes[i][0] = *reinterpret_cast<const unsigned*>(at);
            }
            const unsigned factor = i < 2 ? factors.x : factors.y;
            a[i] = bits(__hmul2(*reinterpret_cast<const __half2*>(&a[i]),
                                *reinterpret_cast<const __half2*>(&factor)));
        }
#pragma unroll
        for (int j = 0; j < NTILES; j += 2) {
            const unsigned select = j % 4 ? 0x7362 : 0x5140;
            const uint2 low =
                e4m3x4_to_f16x4(__byte_perm(codes[0][j / 4], codes[1][j / 4], select));
            const uint2 high =
                e4m3x4_to_f16x4(__byte_perm(codes[2][j / 4], codes[3][j / 4], select));
            mma_f16(sum[j], a, low.x, high.x);
            mma_f16(sum[j + 1], a, low.y, high.y);
        }
    }
}

// The same for bf16 values, from byte `offset` of every row on.
__device__ __forceinline__ void weights_bf16(float (&sum)[NTILES][4], const unsigned char* stage,
                                             int offset, const Shared& shared, int padded) {
    const int lane = threadIdx.x % WARP, quad = lane % 4;
#pragma unroll 2
    for (int block = 0; block < padded; block += 16) {
        unsigned a[4], values[4][4];
        load_weights(a, shared.weights_bf16, block);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned char* at =
                stage + (block + tile_row(4 * quad + i)) * PITCH + offset + 2 * NTILES * (lane / 4);
            if constexpr (NTILES == 8) {
                const uint4 row = *reinterpret_cast<const uint4*>(at);
                values[i][0] = row.x, values[i][1] = row.y;
                values[i][2] = row.z, values[i][3] = row.w;
            } else {
                const uint2 row = *reinterpret_cast<const uint2*>(at);
                values[i][0] = row.x, values[i][1] = row.y;
            }
        }
#pragma unroll
        for (int j = 0; j < NTILES; ++j) {
            const unsigned select = j % 2 ? 0x7632 : 0x5410;
            const unsigned b0 = __byte_perm(values[0][j / 2], values[1][j / 2], select);
            const unsigned b1 = __byte_perm(values[2][j / 2], values[3][j / 2], select);
            mma_bf16(sum[j], a, b0, b1);
        }
    }
}

// Finds the largest scale code of `group` among the tile's rows and writes the factors of all
// columns relative to it. Every warp that needs them does this, those of one group alike.
__device__ __forceinline__ int relative_scales(Shared& shared, const unsigned char* stage,
                                               int group, int rows, int padded) {
    constexpr int STEPS = (TILE + WARP - 1) / WARP;
    int codes[STEPS], largest = 0;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int x = step * WARP + threadIdx.x % WARP;
        codes[step] =
            x < padded && tile_row(x) < rows ? stage[tile_row(x) * PITCH + ROW_BYTES + group] : 0;
        largest = max(largest, codes[step]);
    }
    largest = __reduce_max_sync(~0u, (unsigned)largest);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int x = step * WARP + threadIdx.x % WARP;
        // 2^(code - largest) in f16, or 0
        const unsigned short half = max(codes[step] - largest + 15, 0) << 10;
        if (x < padded) shared.factors[group][x] = __ushort_as_half(half);
    }
    __syncwarp();
    return largest;
}

// out = out · rescale + this tile's p · v, for the values of this warp.
__device__ __forceinline__ void weights_values(float (&out)[NTILES][4], const unsigned char* stage,
                                               const Shared& shared, int largest, int padded) {
    const int group = threadIdx.x / WARP / SPLIT;
    const int value = threadIdx.x / WARP % SPLIT * 8 * NTILES;
    const int head = threadIdx.x % WARP / 4;
    float sum[NTILES][4] = {}, factor = 1.0f / (1 << WEIGHT_LOG2);
    if (FP8 && group < 7) {
        weights_codes(sum, stage, group, value, shared, padded);
        factor = __int_as_float(max(largest - WEIGHT_LOG2, 0) << 23);
    } else {
        weights_bf16(sum, stage, (FP8 ? DIM - ROTARY : 128 * group) + 2 * value, shared, padded);
    }
    const float before[2] = {shared.rescale[head], shared.rescale[head + 8]};
#pragma unroll
    for (int j = 0; j < NTILES; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // With a single tile nothing came before, and `out` need not live through the other
            // phases.
            out[j][i] = sum[j][i] * factor + (STAGES == 1 ? 0.0f : out[j][i] * before[i / 2]);
        }
    }
}

// The most of `keys` keys that one block of the cluster can have.
__device__ __forceinline__ int most_turns(int keys) {
    return ((keys + 3) / 4 + CLUSTER - 1) / CLUSTER * 4;
}

// This block's keys, without those that do not exist, in the order in which they are listed: as
// without a list where that holds every entry. Returns how many.
__device__ __forceinline__ int list_keys(int* list, Shared& shared, const Caches& caches,
                                         const int64* selected, int listed, int window, int entries,
                                         int64 first_selected) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int turns = most_turns(window + listed);
    int count = 0;
    for (int base = 0; base < turns; base += THREADS) {
        const int j = base + threadIdx.x;
        const int key = turn_of(j, caches.rank, CLUSTER);
        int code = 0;
        bool seen = false;
        const int at_list = key - caches.window_keys;
        if (j < turns && at_list < 0) {
            int slot = caches.first_slot + key;
            if (slot >= caches.ring_slots) slot -= caches.ring_slots;
            seen = true;
            code = ~slot;
        } else if (j < turns && at_list < listed) {
            const bool is_there = base == 0 && caches.window_keys == window;
            const int64 entry = is_there ? first_selected : selected[at_list];
            seen = entry >= 0 && entry < entries;
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
    return count;
}

// Leaves what this block has finished for the last of the SPLITS blocks that have finished the same
// values, which sets shared.last and gets the sum of all. The order of the sum is that of the
// splits.
__device__ __forceinline__ void merge_splits(float (&values)[OUT], float& peak, float& denominator,
                                             float* partial, int* counters, int rank, int split,
                                             Shared& shared) {
    const int unit = (blockIdx.z * gridDim.y + blockIdx.y) * CLUSTER + rank;
    float* records = partial + ((int64)unit * SPLITS * THREADS + threadIdx.x) * (OUT + 2);
    constexpr int STRIDE = THREADS * (OUT + 2);
    float2* mine = reinterpret_cast<float2*>(records + split * STRIDE);
    mine[0] = make_float2(peak, denominator);
#pragma unroll
    for (int i = 0; i < OUT; i += 2) mine[1 + i / 2] = make_float2(values[i], values[i + 1]);
    if (!last_arriver(counters + unit, SPLITS, &shared.last)) return;
    float2 found[SPLITS][1 + OUT / 2];
#pragma unroll
    for (int other = 0; other < SPLITS; ++other) {
#pragma unroll
        for (int i = 0; i < 1 + OUT / 2; ++i) {
            found[other][i] = __ldcg(reinterpret_cast<const float2*>(records + other * STRIDE) + i);
        }
        peak = fmaxf(peak, found[other][0].x);
    }
    denominator = 0.0f;
#pragma unroll
    for (int i = 0; i < OUT; ++i) values[i] = 0.0f;
#pragma unroll
    for (int other = 0; other < SPLITS; ++other) {
        const float share = exp2_fast(found[other][0].x - peak);
        denominator += share * found[other][0].y;
#pragma unroll
        for (int i = 0; i < OUT; i += 2) {
            values[i] += share * found[other][1 + i / 2].x;
            values[i + 1] += share * found[other][1 + i / 2].y;
        }
    }
}

}  // namespace

// Grid: (CLUSTER, ⌈heads / 16⌉, tokens), clusters along x. Dynamic shared memory: Shared, then the
// list of keys. `entries_data` is null without compressed entries; `listed` is the length of a
// token's list. With SPLITS > 1 the grid is (SPLITS · CLUSTER, ...), `partial` has OUT + 2 floats
// per thread and `counters` a zero per SPLITS blocks.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    attention_decode(const bf16* q, const settled_int64* positions, const float* sinks,
                     const float* inv_freq, const unsigned char* ring_data,
                     const unsigned char* ring_scale, const unsigned char* entries_data,
                     const unsigned char* entries_scale, const int64* selected, bf16* out,
                     float* partial, int* counters, int heads, int ring_slots, int entries,
                     int listed, int ratio, int window, float scale_log2) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    int* list = reinterpret_cast<int*>(memory + sizeof(Shared));
    assert_shared_memory(sizeof(Shared) + (LISTED ? 4 * most_turns(window + listed) : 0));
    const int rank = cluster_rank();
    const int split = blockIdx.x / CLUSTER;
    const int token = blockIdx.z;
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const int first_head = blockIdx.y * HEADS;

    // Needed at the end. They wait in shared memory, which they reach while the rows come.
    float sink = 0.0f, frequency = 0.0f;
    if (threadIdx.x < HEADS && first_head + threadIdx.x < heads)
        sink = fetch_constant(sinks + first_head + threadIdx.x);
    if (warp == WARPS - 1) frequency = fetch_constant(inv_freq + lane);
    if (threadIdx.x == 0) {
        const unsigned merged = shared_address(&shared.merged);
        barrier_init(merged, 1);
        barrier_expect(
            merged, sizeof(Shared::merge) + sizeof(Shared::merge_scale) + sizeof(Shared::peak_sum));
        barrier_fence();
    }
    __syncthreads();
    cluster_arrive();

    Caches caches{ring_data, ring_scale, entries_data, entries_scale, ring_slots,
                  0,         0,          rank,         CLUSTER};
    const int pair = warp / (2 * SPLIT);
    QueryGroup query[2];
    // q_HD = q_THD[token]
    const auto load_query = [&] {
        const bf16* q_token = q + (int64)token * heads * DIM;
        query[0].load(q_token, 2 * pair, first_head + lane / 4, heads, FP8);
        query[1].load(q_token, 2 * pair + 1, first_head + lane / 4, heads, FP8 && pair < 3);
    };
    const auto keep_constants = [&](int64 position) {
        if (threadIdx.x < HEADS) shared.sinks[threadIdx.x] = sink * 1.4426950408889634f;
        if (warp == WARPS - 1) shared.turns[lane] = conjugate(rope_turn(position, frequency));
    };
    // The first rows: keys_KD = torch.cat([window_rows, entries[indices]]), as stored.
    const auto request_rows = [&](int count) {
#pragma unroll
        for (int chunk = 0; chunk < STAGES * CHUNKS; ++chunk) {
            const int rows = min(count - chunk * CHUNK, CHUNK);
            if (rows > 0) {
                gather<EARLY>(caches, list, shared.rows[0] + chunk * CHUNK * PITCH, chunk * CHUNK,
                              rows);
            }
            cp_async_commit();
        }
    };
    int count, keys = 0;
    if constexpr (LISTED) {
        const int64 position = fetch_settled(positions + token);
        caches.see(position, window);
        keep_constants(position);
        pdl_wait();
        if (!ROWS_FIRST) pdl_launch();
        // indices = selected_TK[token]
        selected += (int64)token * listed;
        const int key = turn_of(threadIdx.x, rank, CLUSTER) - window;
        const int64 first_selected = key >= 0 && key < listed ? selected[key] : -1;
        load_query();
        count = list_keys(list, shared, caches, selected, listed, window, entries, first_selected);
        request_rows(count);
    } else {
        const bool waits_first = blockIdx.z * gridDim.y + blockIdx.y >= WAVE;
        if (waits_first) {
            pdl_wait();
            pdl_launch();
        }
        const int seen = AS_LAST ? gridDim.z - 1 : token;
        const int64 position = fetch_settled(positions + seen);
        caches.see(position, window);
        const int complete =
            entries_data ? (int)min(divide(position + 1, ratio), (int64)entries) : 0;
        keys = caches.window_keys + complete;
        if (SPLITS > 1 && keys > SPLIT_KEYS)
            caches.rank += split * CLUSTER, caches.ranks = SPLITS * CLUSTER;
        if (SPLITS > 1 && keys <= SPLIT_KEYS && split > 0) {
            cluster_wait();
            return;
        }
        caches.see_new(position, seen + 1, ratio, complete);
        count = caches.share(keys);
        request_rows(count);
        keep_constants(AS_LAST ? fetch_settled(positions + token) : position);
        if (!waits_first) {
            pdl_wait();
            pdl_launch();
        }
        load_query();
        gather_new(caches, shared.rows[0], 0, STAGES * TILE, keys);
        cp_async_commit();
    }
    const int tiles = (count + TILE - 1) / TILE;
    const auto rows_of = [&](int tile) { return min(count - tile * TILE, TILE); };
    // Otherwise the first rows are waited for.
    if (tiles == 0) __syncthreads();
    if (FP8) query[0].to_f16();
    if (FP8 && pair < 3) query[1].to_f16();
    Softmax softmax;
    float result[NTILES][4] = {};
    for (int tile = 0; tile < (STAGES == 1 ? min(tiles, 1) : tiles); ++tile) {
        const unsigned char* stage = shared.rows[tile % STAGES];
        const int rows = rows_of(tile), padded = (rows + 15) & ~15;
        // logits_HK = q_HD @ keys_KD.T * softmax_scale; the scale comes with the softmax
        if constexpr (STAGES == 1) {
            rows_wait<EARLY ? 0 : CHUNKS - 1>();
            if (ROWS_FIRST) pdl_launch();
            query_key(stage, query, shared, 0, EARLY ? padded : min(padded, CHUNK));
            if (!EARLY && CHUNKS > 1 && padded > CHUNK) {
                rows_wait<0>();
                query_key(stage, query, shared, CHUNK, padded);
            }
        } else {
            if (tile == 0 && !EARLY) {
                rows_wait<STAGES - 1>();
            } else {
                rows_wait<0>();
            }
            if (tile > 0 && tile + 1 < tiles) {
                unsigned char* next = shared.rows[(tile + 1) % STAGES];
                const int first = (tile + 1) * TILE;
                gather<EARLY>(caches, list, next, first, rows_of(tile + 1));
                if (EARLY) gather_new(caches, next, first, rows_of(tile + 1), keys);
                cp_async_commit();
            }
            query_key(stage, query, shared, 0, padded);
        }
        int largest = 0;
        // Block scales of the values, relative to the largest of the tile.
        if (FP8 && warp / SPLIT < 7)
            largest = relative_scales(shared, stage, warp / SPLIT, rows, padded);
        __syncthreads();
        // p_HK = exp(logits_HK - peak_H)
        softmax.tile(shared, rows, padded, scale_log2);
        __syncthreads();
        // out_HD += p_HK @ keys_KD
        weights_values(result, stage, shared, largest, padded);
    }

    // Each block sends every other, and itself, the pieces that the other finishes: f16, relative
    // to the warp's largest. A block without keys sends zeros.
    softmax.finish();
    cluster_wait();
    const auto largest_of = [&](bool finite) {
        unsigned largest = 0;
#pragma unroll
        for (int j = 0; j < NTILES; ++j) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const unsigned size = __float_as_uint(fabsf(result[j][c]));
                largest = max(largest, finite && size >= 0x7f800000u ? 0 : size);
            }
        }
        return __reduce_max_sync(~0u, largest);
    };
    unsigned exponent = largest_of(false) >> 23;
    // One head's NaN must not cost the others their digits.
    if (exponent == 255) exponent = largest_of(true) >> 23;
    // The largest becomes less than 2^15; below 2^-100 nothing is lost that matters.
    exponent = max(exponent, 27u);
    const float shrink = __uint_as_float((268 - exponent) << 23);
    const float grow = __uint_as_float((exponent - 14) << 23);
    const unsigned merged = shared_address(&shared.merged);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        unsigned packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // 8 warps: 8 values of sum j = 0 .. 7 in column `piece`; 16 warps: j = 0 .. 3 of two
            // columns.
            const int j = 2 * i % NTILES;
            const int c = PIECES == 4 ? piece : 2 * piece + i / 2;
            packed[i] = bits(__floats2half2_rn(result[j][c] * shrink, result[j + 1][c] * shrink));
        }
        const int target = (warp * PIECES + piece) % CLUSTER;
        const int at = (warp * PIECES + piece) / CLUSTER;
        const unsigned barrier = remote(merged, target);
        store_remote(remote(shared_address(&shared.merge[rank][at][lane]), target),
                     make_uint4(packed[0], packed[1], packed[2], packed[3]), barrier);
        if (lane == 0)
            store_remote1(remote(shared_address(&shared.merge_scale[rank][at]), target), grow,
                          barrier);
    }
    if (threadIdx.x % LANES < CLUSTER) {
        const int target = threadIdx.x % LANES;
        store_remote2(remote(shared_address(&shared.peak_sum[rank][threadIdx.x / LANES]), target),
                      make_float2(softmax.peak, softmax.sum), remote(merged, target));
    }
    // The values that this thread finishes: OUT of piece `slot` of a lane. A piece is half of the
    // values that a lane of p·v has of one head (8 warps), or all of them (16 warps).
    const int slot = threadIdx.x * OUT / (WARP * PIECE);
    const int out_lane = threadIdx.x * OUT / PIECE % WARP;
    const int out_warp = (slot * CLUSTER + rank) / PIECES;
    const int out_piece = (slot * CLUSTER + rank) % PIECES;
    const int owned = out_lane / 4 + 8 * (out_piece * 2 / PIECES);
    const int out_dim = 8 * NTILES * out_warp + 2 * NTILES * (out_lane % 4) +
                        out_piece % (PIECES / 2) * PIECE + threadIdx.x * OUT % PIECE;
    const int out_head = first_head + owned;
    mail_wait(merged, 0);

    // denominator_H = exp(logits_HK - peak_H).sum(-1) + exp(sink_H - peak_H), from every block's
    // parts
    float2 parts[CLUSTER];
    const float sink_log2 = shared.sinks[owned];
    float peak = sink_log2;
    float denominator = 0.0f;
    float values[OUT] = {};
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) {
        parts[block] = shared.peak_sum[block][owned];
        peak = fmaxf(peak, parts[block].x);
    }
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) {
        const float share = exp2_fast(parts[block].x - peak);
        const float factor = share * shared.merge_scale[block][slot];
        denominator += parts[block].y * share;
        const __half2* from =
            reinterpret_cast<const __half2*>(&shared.merge[block][slot][out_lane]);
#pragma unroll
        for (int i = 0; i < OUT; i += 2) {
            const float2 pair_values = __half22float2(from[(threadIdx.x * OUT % PIECE + i) / 2]);
            values[i] += factor * pair_values.x;
            values[i + 1] += factor * pair_values.y;
        }
    }
    if (SPLITS > 1 && caches.ranks > CLUSTER) {
        merge_splits(values, peak, denominator, partial, counters, rank, split, shared);
        if (!shared.last) return;
    }
    if (out_head >= heads) return;
    // out_HD = rope(out_HD / denominator_H, position, inverse=True)
    const float normaliser = 1.0f / (denominator + exp2_fast(sink_log2 - peak));
    bf16* to = out + ((int64)token * heads + out_head) * DIM + out_dim;
#pragma unroll
    for (int i = 0; i < OUT; i += 2) {
        __nv_bfloat162 rounded =
            __floats2bfloat162_rn(values[i] * normaliser, values[i + 1] * normaliser);
        if (out_dim >= DIM - ROTARY) {
            const float2 pair_values = __bfloat1622float2(rounded);
            const Turn turn = shared.turns[(out_dim - (DIM - ROTARY) + i) / 2];
            const float2 turned = rotate(pair_values.x, pair_values.y, turn);
            rounded = __floats2bfloat162_rn(turned.x, turned.y);
        }
        *reinterpret_cast<__nv_bfloat162*>(to + i) = rounded;
    }
}
