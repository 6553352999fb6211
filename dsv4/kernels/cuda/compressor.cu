// Compressor (dsv4/ops/compressor.py): pools a window of tokens into one cached row, when the step completes it.
//
// Block (x, y) makes `channels` channels of the y-th window that the step may complete; the blocks of one window form a
// cluster and share the sum of squares of the norm. GROUPS groups of threads split the tokens of the window. Tokens of this
// step come from the arguments, earlier ones from the ring. The ring is longer than the tokens a window can need by the
// longest decode step, so in a decode step (`store`) these kernels may also write it while others still read; a longer
// step writes it afterwards, with compress_ring.
#include "cluster.cuh"
#include "kv_rows.cuh"
#include "rope.cuh"

#ifndef RATIO
#define RATIO 4
#endif
#ifndef GROUPS
#define GROUPS 1
#endif

constexpr bool OVERLAP = RATIO == 4;
constexpr int WINDOW = OVERLAP ? 2 * RATIO : RATIO, GROUP_TOKENS = WINDOW / GROUPS, MOST_BLOCKS = 8;

// What the step brings and what the ring remembers. Both scores lack resp. have the positional bias.
struct Tokens {
    const float *kv, *score, *ape;
    float *ring_kv, *ring_score;
    int start, count, kv_stride, score_stride, slots, columns;

    __device__ __forceinline__ void store(int token, int column) const {
        const int position = start + token;
        const int64 to = (int64)(position % slots) * columns + column;
        ring_kv[to] = kv[(int64)token * kv_stride + column];
        ring_score[to] = score[(int64)token * score_stride + column] + ape[position % RATIO * columns + column];
    }
};

__device__ __forceinline__ float rounded(float value, bool round) { return round ? __bfloat162float(__float2bfloat16(value)) : value; }

// torch: (softmax(score) * kv).sum over the window's tokens, for the channel of this thread; valid in group 0.
__device__ __forceinline__ float pool(const Tokens& tokens, int window, int channel, bool active, int width, float* partial) {
    const int lanes = blockDim.x / GROUPS, group = threadIdx.x / lanes;
    const int first = RATIO * window - (WINDOW - RATIO), ring_first = (first + tokens.slots) % tokens.slots;
    float values[GROUP_TOKENS], scores[GROUP_TOKENS];
#pragma unroll
    for (int i = 0; i < GROUP_TOKENS; ++i) {
        const int nth = group * GROUP_TOKENS + i, position = first + nth;
        // An overlapping window pools the first half of the columns of the ratio tokens before its own.
        const int column = channel + (OVERLAP && nth >= RATIO ? width : 0);
        const bool seen = active && position >= 0, fresh = position >= tokens.start;
        const int slot = ring_first + nth - (ring_first + nth >= tokens.slots ? tokens.slots : 0);
        const int64 old = (int64)slot * tokens.columns + column, token = position - tokens.start;
        const float* from_kv = fresh ? tokens.kv + token * tokens.kv_stride + column : tokens.ring_kv + old;
        const float* from_score = fresh ? tokens.score + token * tokens.score_stride + column : tokens.ring_score + old;
        values[i] = seen ? *from_kv : 0.0f;
        scores[i] = seen ? *from_score : __int_as_float(0xff800000);  // -∞
        if (seen && fresh) scores[i] += tokens.ape[nth % RATIO * tokens.columns + column];
    }
    float largest = scores[0];
#pragma unroll
    for (int i = 1; i < GROUP_TOKENS; ++i) largest = fmaxf(largest, scores[i]);
    if (GROUPS > 1) {
        partial[threadIdx.x] = largest;
        __syncthreads();
        for (int other = 0; other < GROUPS; ++other) largest = fmaxf(largest, partial[other * lanes + threadIdx.x % lanes]);
        __syncthreads();
    }
    float shares = 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < GROUP_TOKENS; ++i) {
        const float share = expf(scores[i] - largest);
        shares += share;
        sum = fmaf(share, values[i], sum);
    }
    if (GROUPS > 1) {
        float* partial_sum = partial + blockDim.x;
        partial[threadIdx.x] = shares, partial_sum[threadIdx.x] = sum;
        __syncthreads();
        shares = sum = 0.0f;
        for (int other = 0; other < GROUPS; ++other) {
            shares += partial[other * lanes + threadIdx.x % lanes];
            sum += partial_sum[other * lanes + threadIdx.x % lanes];
        }
        __syncthreads();
    }
    return sum / shares;
}

// The sum of `mine` over the blocks of the cluster, in rank order. Needs an earlier cluster_arrive() of every thread.
__device__ __forceinline__ float cluster_sum(float mine, float* sums) {
    cluster_wait();
    if (threadIdx.x < gridDim.x) store_remote(&sums[blockIdx.x], threadIdx.x, mine);
    cluster_arrive();
    cluster_wait();
    float sum = 0.0f;
    for (unsigned block = 0; block < gridDim.x; ++block) sum += sums[block];
    return sum;
}

// torch: hadamard(rows), of a row of 128 values in shared memory by one warp: four consecutive values a lane.
__device__ __forceinline__ void hadamard_128(float* row, float normaliser, bool round) {
    const int lane = threadIdx.x % WARP;
    float4 v = reinterpret_cast<const float4*>(row)[lane];
    v = make_float4(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
    v = make_float4(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
    float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(~0u, values[i], step);
            values[i] = lane & step ? other - values[i] : values[i] + other;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) row[4 * lane + i] = rounded(values[i] * normaliser, round);
}

// The same for any width, by the block; ends with a barrier.
__device__ __forceinline__ void hadamard(float* row, int width, float normaliser, bool round) {
    if (width == 128) {
        if (threadIdx.x < WARP) hadamard_128(row, normaliser, round);
        __syncthreads();
        return;
    }
    for (int step = 1; step < width; step *= 2) {
        for (int i = threadIdx.x; i < width / 2; i += blockDim.x) {
            const int at = i / step * 2 * step + i % step;
            const float a = row[at], b = row[at + step];
            row[at] = a + b, row[at + step] = a - b;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < width; i += blockDim.x) row[i] = rounded(row[i] * normaliser, round);
    __syncthreads();
}

// The bits of a float rounded to bfloat16, by integer arithmetic: CUDA 13.0 compiles the low byte of a conversion to
// bfloat16 into another floating-point conversion.
__device__ __forceinline__ unsigned bf16_bits(float value) {
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
}

// Stores channels [first, first + channels) of a row as dsv4/cache_rows.py lays them out; `row` holds just these. For
// KV_FP8 `first` is a multiple of 64, for INDEX_FP8 the channels are the whole row.
__device__ __forceinline__ void store_channels(const float* row, int first, int channels, const RowStore& rows, int64 slot) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    unsigned char* out = rows.row(slot);
    if (rows.format == ROW_BF16 || rows.format == ROW_F32) {
        for (int i = threadIdx.x; i < channels; i += blockDim.x) {
            if (rows.format == ROW_F32) reinterpret_cast<float*>(out)[first + i] = row[i];
            else reinterpret_cast<bf16*>(out)[first + i] = __float2bfloat16(row[i]);
        }
        return;
    }
    if (rows.format == ROW_INDEX_FP8) {
        // Every warp finds the scale, so that no barrier is needed. Bits of non-negative floats compare like integers.
        unsigned peak_bits = 0;
        for (int i = lane; i < channels; i += WARP) peak_bits = max(peak_bits, __float_as_uint(fabsf(row[i])));
        const float peak = __uint_as_float(__reduce_max_sync(~0u, peak_bits));
        const float scale = peak > 0.0f ? __fdiv_rn(peak, E4M3_LARGEST) : 1.0f;
        for (int i = threadIdx.x; i < channels; i += blockDim.x) out[i] = float_to_e4m3(__fdiv_rn(row[i], scale));
        if (threadIdx.x == 0) *reinterpret_cast<float*>(rows.row_scale(slot)) = scale;
        return;
    }
    const int quantised = rows.quantised(), groups = (quantised + KV_GROUP - 1) / KV_GROUP;
    unsigned char* scale = rows.row_scale(slot);
    for (int group = warp; group * KV_GROUP < channels && first + group * KV_GROUP < quantised; group += warps) {
        const int i = group * KV_GROUP + 2 * lane;
        const bool one = i < channels && first + i < quantised, two = i + 1 < channels && first + i + 1 < quantised;
        int code;
        const unsigned short codes = encode_kv_group(one ? row[i] : 0.0f, two ? row[i + 1] : 0.0f, code);
        if (one) out[first + i] = codes & 0xff;
        if (two) out[first + i + 1] = codes >> 8;
        if (lane == 0) scale[first / KV_GROUP + group] = code;
    }
    for (int i = threadIdx.x; i < channels; i += blockDim.x) {
        if (first + i < quantised) continue;
        const unsigned bits = bf16_bits(row[i]);
        unsigned char* at = out + quantised + 2 * (first + i - quantised);
        at[0] = bits & 0xff, at[1] = bits >> 8;
    }
    if (first + channels == rows.width) {
        for (int group = groups + threadIdx.x; group < rows.scale_bytes(); group += blockDim.x) scale[group] = 0;
    }
}

// Shared memory: channels + (GROUPS > 1 ? 2 · blockDim.x : 0) floats. `round`: the compute dtype is bfloat16.
extern "C" __global__ void __launch_bounds__(512, 1)
    compress(const float* kv, const float* score, const int64* positions, const float* ape, const float* norm, const float* inv_freq,
             float* ring_kv, float* ring_score, unsigned char* data, unsigned char* block_scale, int count, int kv_stride,
             int score_stride, int slots, int format, int width, int rope_width, int row_slots, int channels, int store, int hadamard_keys,
             int round, float eps, float normaliser) {
    extern __shared__ __align__(16) float row[];
    __shared__ float scratch[WARP + 1], sums[MOST_BLOCKS];
    const int first = blockIdx.x * channels, columns = OVERLAP ? 2 * width : width;
    pdl_launch();
    // Weights that the end of a window needs, and the biases of an overlapping one, are fetched while waiting.
    for (int i = 32 * threadIdx.x; i < channels; i += 32 * blockDim.x) prefetch_l2(norm + first + i);
    if (threadIdx.x == blockDim.x - 1) prefetch_l2(inv_freq);
    if (OVERLAP) {
        for (int i = 32 * threadIdx.x; i < RATIO * columns; i += 32 * blockDim.x) prefetch_l2(ape + i);
    }
    pdl_wait();
    const Tokens tokens{kv, score, ape, ring_kv, ring_score, (int)positions[0], count, kv_stride, score_stride, slots, columns};
    const auto store_ring = [&] {
        const int share = columns / gridDim.x;
        for (int token = 0; token < count; ++token) {
            for (int i = threadIdx.x; i < share; i += blockDim.x) tokens.store(token, blockIdx.x * share + i);
        }
    };
    const bool stores = store && blockIdx.y == 0;
    const int window = tokens.start / RATIO + blockIdx.y;
    if ((window + 1) * RATIO > tokens.start + count || window >= row_slots) {
        if (stores) store_ring();
        return;
    }
    if (gridDim.x > 1) cluster_arrive();
    const int lanes = blockDim.x / GROUPS;
    float squares = 0.0f;
    for (int base = 0; base < channels; base += lanes) {
        const int i = base + threadIdx.x % lanes;
        float pooled = pool(tokens, window, first + i, i < channels, width, row + channels);
        if (threadIdx.x < lanes && i < channels) {
            pooled = rounded(pooled, round);
            row[i] = pooled;
            squares += pooled * pooled;
        }
    }
    // After the pool's loads, which would otherwise wait for these.
    if (stores) store_ring();
    float total = block_sum(squares, scratch);
    if (gridDim.x > 1) total = cluster_sum(total, sums);
    const float inverse = rsqrtf(total / width + eps);
    for (int i = threadIdx.x; i < channels; i += blockDim.x) row[i] = rounded(row[i] * inverse * norm[first + i], round);
    __syncthreads();
    for (int pair = threadIdx.x; pair < rope_width / 2; pair += blockDim.x) {
        const int i = width - rope_width + 2 * pair - first;
        if (i < 0 || i >= channels) continue;
        const float2 turned = rotate(row[i], row[i + 1], rope_turn((int64)window * RATIO, inv_freq[pair]));
        row[i] = rounded(turned.x, round), row[i + 1] = rounded(turned.y, round);
    }
    __syncthreads();
    if (hadamard_keys) hadamard(row, width, normaliser, round);
    store_channels(row, first, channels, RowStore{data, block_scale, format, width, rope_width}, window);
}

// Stores the last gridDim.x of `count` tokens in the ring, one per block.
extern "C" __global__ void __launch_bounds__(256)
    compress_ring(const float* kv, const float* score, const int64* positions, const float* ape, float* ring_kv, float* ring_score,
                  int count, int kv_stride, int score_stride, int slots, int columns) {
    pdl_launch();
    pdl_wait();
    const Tokens tokens{kv, score, ape, ring_kv, ring_score, (int)positions[0], count, kv_stride, score_stride, slots, columns};
    for (int i = threadIdx.x; i < columns; i += blockDim.x) tokens.store(count - gridDim.x + blockIdx.x, i);
}
