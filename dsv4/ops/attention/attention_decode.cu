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
#include "attention_decode_keys.cuh"
#include "attention_decode_merge.cuh"
#include "attention_decode_products.cuh"

// What is needed at the end. It waits in shared memory, which it reaches while the rows come.
struct Constants {
    float sink = 0.0f, frequency = 0.0f;

    __device__ __forceinline__ void fetch(const float* sinks, const float* inv_freq, int first_head,
                                          int heads) {
        if (threadIdx.x < HEADS && first_head + threadIdx.x < heads)
            sink = fetch_constant(sinks + first_head + threadIdx.x);
        if (threadIdx.x / WARP == WARPS - 1)
            frequency = fetch_constant(inv_freq + threadIdx.x % WARP);
    }

    __device__ __forceinline__ void keep(Shared& shared, int64 position) const {
        if (threadIdx.x < HEADS) shared.sinks[threadIdx.x] = sink * 1.4426950408889634f;
        if (threadIdx.x / WARP == WARPS - 1)
            shared.turns[threadIdx.x % WARP] = conjugate(rope_turn(position, frequency));
    }
};

// logits_HK = q_HD @ keys_KD.T of a tile, as its rows come, while those of the next one are asked
// for. The scale comes with the softmax.
__device__ __forceinline__ void find_logits(const Keys& keys, const Query& query, int tile,
                                            int padded, Shared& shared) {
    const unsigned char* stage = shared.rows[tile % STAGES];
    if constexpr (STAGES == 1) {
        rows_wait<EARLY ? 0 : CHUNKS - 1>();
        if (ROWS_FIRST) pdl_launch();
        query.multiply(stage, shared, 0, EARLY ? padded : min(padded, CHUNK));
        if (!EARLY && CHUNKS > 1 && padded > CHUNK) {
            rows_wait<0>();
            query.multiply(stage, shared, CHUNK, padded);
        }
    } else {
        if (tile == 0 && !EARLY) {
            rows_wait<STAGES - 1>();
        } else {
            rows_wait<0>();
        }
        if (tile > 0 && tile + 1 < keys.tiles()) keys.request(tile + 1, shared);
        query.multiply(stage, shared, 0, padded);
    }
}

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
    const int first_head = blockIdx.y * HEADS;

    Constants constants;
    constants.fetch(sinks, inv_freq, first_head, heads);
    expect_parts(shared);

    Keys keys{ring_data,  ring_scale, entries_data, entries_scale, ring_slots,
              list,       rank,       CLUSTER};
    Query query;
    // q_HD = q_THD[token]
    q += (int64)token * heads * DIM;
    if constexpr (LISTED) {
        const int64 position = fetch_settled(positions + token);
        keys.see(position, window);
        constants.keep(shared, position);
        pdl_wait();
        if (!ROWS_FIRST) pdl_launch();
        // indices = selected_TK[token]
        selected += (int64)token * listed;
        const int key = turn_of(threadIdx.x, rank, CLUSTER) - window;
        const int64 first_selected = key >= 0 && key < listed ? selected[key] : -1;
        query.load(q, first_head, heads);
        keys.find(selected, listed, window, entries, first_selected, shared);
        keys.request_first(shared);
    } else {
        const bool waits_first = blockIdx.z * gridDim.y + blockIdx.y >= WAVE;
        if (waits_first) {
            pdl_wait();
            pdl_launch();
        }
        const int seen = AS_LAST ? gridDim.z - 1 : token;
        const int64 position = fetch_settled(positions + seen);
        keys.see(position, window);
        const int complete =
            entries_data ? (int)min(divide(position + 1, ratio), (int64)entries) : 0;
        keys.all = keys.window_keys + complete;
        if (SPLITS > 1 && keys.all > SPLIT_KEYS)
            keys.rank += split * CLUSTER, keys.ranks = SPLITS * CLUSTER;
        if (SPLITS > 1 && keys.all <= SPLIT_KEYS && split > 0) {
            cluster_started();
            return;
        }
        keys.see_new(position, seen + 1, ratio, complete);
        keys.count = keys.share();
        keys.request_first(shared);
        constants.keep(shared, AS_LAST ? fetch_settled(positions + token) : position);
        if (!waits_first) {
            pdl_wait();
            pdl_launch();
        }
        query.load(q, first_head, heads);
        keys.gather_new(shared.rows[0], 0, STAGES * TILE);
        cp_async_commit();
    }
    const int tiles = keys.tiles();
    // Otherwise the first rows are waited for.
    if (tiles == 0) __syncthreads();
    query.to_f16();
    Softmax softmax;
    float result[NTILES][4] = {};
    for (int tile = 0; tile < (STAGES == 1 ? min(tiles, 1) : tiles); ++tile) {
        const unsigned char* stage = shared.rows[tile % STAGES];
        const int rows = keys.rows_of(tile), padded = (rows + 15) & ~15;
        find_logits(keys, query, tile, padded, shared);
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
    softmax.finish();
    cluster_started();
    send_parts(result, softmax, rank, shared);
    const Owned owned(rank);
    const int head = first_head + owned.head;
    wait_mail(&shared.merged, 0);

    // denominator_H = exp(logits_HK - peak_H).sum(-1) + exp(sink_H - peak_H), from every block's
    // parts
    const float sink_log2 = shared.sinks[owned.head];
    Merged merged;
    merged.add_blocks(owned, sink_log2, shared);
    if (SPLITS > 1 && keys.ranks > CLUSTER) {
        merged.add_splits(partial, counters, rank, split, shared);
        if (!shared.last) return;
    }
    if (head >= heads) return;
    merged.store(out + ((int64)token * heads + head) * DIM + owned.dim, owned.dim, sink_log2,
                 shared);
}
