// Attention for any head width, rotary width and row format (dsv4/ops/attention/__init__.py): the
// small geometries of tests. One block per head and token, float32 throughout; speed does not
// matter.
#include "kv_rows.cuh"
#include "rope.cuh"
#include <math_constants.h>

// 1: every token sees what the last one sees (dsv4/ops/attention/block.py)
#ifndef AS_LAST
#define AS_LAST 0
#endif

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int TILE = 64;
constexpr int WIDEST_ROW = 4096;

// The key with index `index` among all that the token may see: window first, then compressed
// entries. False: none.
__device__ __forceinline__ bool find_key(int64 index, int64 position, int window_keys,
                                         const int64* selected, const RowStore& ring,
                                         int ring_slots, const RowStore& entries, int entry_slots,
                                         RowStore& rows, int64& slot) {
    if (index < window_keys) {
        rows = ring;
        slot = (position - index) % ring_slots;
        return true;
    }
    rows = entries;
    slot = selected ? selected[index - window_keys] : index - window_keys;
    return slot >= 0 && slot < entry_slots;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_any_geometry(const bf16* q, const int64* positions, const float* sinks,
                           const float* inv_freq, unsigned char* ring_data,
                           unsigned char* ring_scale, unsigned char* entries_data,
                           unsigned char* entries_scale, const int64* selected, bf16* out,
                           int format, int heads, int width, int rope_width, int ring_slots,
                           int entry_slots, int listed, int ratio, int window,
                           float softmax_scale) {
    __shared__ float query[WIDEST_ROW], sums[WIDEST_ROW], logits[TILE];
    const int head = blockIdx.x;
    const int token = blockIdx.y;
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    pdl_wait();
    pdl_launch();
    const int64 position = positions[AS_LAST ? gridDim.y - 1 : token];
    const int64 start = ((int64)token * heads + head) * width;
    const RowStore ring{ring_data, ring_scale, format, width, rope_width};
    const RowStore entries{entries_data, entries_scale, format, width, rope_width};
    if (selected) selected += (int64)token * listed;
    for (int d = threadIdx.x; d < width; d += THREADS) {
        query[d] = __bfloat162float(q[start + d]);
        sums[d] = 0.0f;
    }
    const int window_keys = (int)min(position + 1, (int64)window);
    int64 compressed = 0;
    if (entries_data)
        compressed = selected ? listed : min((position + 1) / ratio, (int64)entry_slots);
    const int64 keys = window_keys + compressed;
    // The sink counts as a key without a value.
    float peak = sinks[head], denominator = 1.0f;
    for (int64 first = 0; first < keys; first += TILE) {
        const int count = (int)min(keys - first, (int64)TILE);
        __syncthreads();
        for (int i = warp; i < count; i += WARPS) {
            RowStore rows;
            int64 slot;
            float logit = -CUDART_INF_F;
            if (find_key(first + i, position, window_keys, selected, ring, ring_slots, entries,
                         entry_slots, rows, slot)) {
                float product = 0.0f;
                for (int d = lane; d < width; d += WARP)
                    product += query[d] * row_value(rows, slot, d);
                logit = warp_sum(product) * softmax_scale;
            }
            if (lane == 0) logits[i] = logit;
        }
        __syncthreads();
        float raised = peak;
        for (int i = 0; i < count; ++i) raised = fmaxf(raised, logits[i]);
        const float before = expf(peak - raised);
        denominator *= before;
        for (int i = 0; i < count; ++i) denominator += expf(logits[i] - raised);
        for (int d = threadIdx.x; d < width; d += THREADS) {
            float sum = sums[d] * before;
            for (int i = 0; i < count; ++i) {
                RowStore rows;
                int64 slot;
                if (find_key(first + i, position, window_keys, selected, ring, ring_slots, entries,
                             entry_slots, rows, slot)) {
                    sum += expf(logits[i] - raised) * row_value(rows, slot, d);
                }
            }
            sums[d] = sum;
        }
        peak = raised;
    }
    __syncthreads();
    const int plain = width - rope_width;
    for (int d = threadIdx.x; d < plain; d += THREADS)
        out[start + d] = __float2bfloat16(sums[d] / denominator);
    for (int pair = threadIdx.x; pair < rope_width / 2; pair += THREADS) {
        const int d = plain + 2 * pair;
        const float a = __bfloat162float(__float2bfloat16(sums[d] / denominator));
        const float b = __bfloat162float(__float2bfloat16(sums[d + 1] / denominator));
        const float2 turned = rotate(a, b, conjugate(rope_turn(positions[token], inv_freq[pair])));
        out[start + d] = __float2bfloat16(turned.x);
        out[start + d + 1] = __float2bfloat16(turned.y);
    }
}
