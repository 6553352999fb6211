// Compressor (dsv4/ops/compressor/__init__.py): pools a window of tokens into one cached row, when
// the step completes it.
//
// The blocks of one window form a cluster: each makes some channels, and they share the sum of
// squares of the norm. Groups groups of threads split the tokens of the window. Tokens of this step
// come from the arguments, earlier ones from the ring. The ring is longer than the tokens a window
// can need by the longest decode step, so in a decode step blocks may write it while others still
// read; a longer step writes it afterwards.
#pragma once
#include "cluster.cuh"
#include "hadamard.cuh"
#include "kv_rows.cuh"
#include "rope.cuh"

// One compressor of a step. `score` lacks the positional bias, `ring_score` has it. `round`: the
// compute dtype is bfloat16.
struct Compression {
    const float *kv, *score, *ape, *norm, *inv_freq;
    float *ring_kv, *ring_score;
    RowStore rows;
    int row_slots, ring_slots, count, kv_stride, score_stride;
    bool rotate_keys, round;
    float eps, normaliser;
};

__device__ __forceinline__ float rounded(float value, bool round) {
    return round ? __bfloat162float(__float2bfloat16(value)) : value;
}

// Stores columns [first, first + columns) of one token of the step in a ring of rows of `width`.
template <int Ratio>
__device__ __forceinline__ void store_in_ring(const Compression& step, int start, int token,
                                              int first, int columns, int width) {
    const int position = start + token, stop = first + columns;
    const int64 to = (int64)(position % step.ring_slots) * width;
    const float *kv = step.kv + (int64)token * step.kv_stride,
                *score = step.score + (int64)token * step.score_stride;
    const float* ape = step.ape + position % Ratio * width;
    for (int base = first + threadIdx.x; base < stop; base += 2 * blockDim.x) {
        // Both loads before a store, which the next load might depend on for all the compiler
        // knows.
        float values[2], scores[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = base + i * blockDim.x;
            if (column < stop) values[i] = kv[column], scores[i] = score[column] + ape[column];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = base + i * blockDim.x;
            if (column < stop)
                step.ring_kv[to + column] = values[i], step.ring_score[to + column] = scores[i];
        }
    }
}

// One channel of one window, its tokens split over Groups threads.
template <int Ratio, int Groups>
struct ChannelPool {
    // Overlapping windows pool the first half of the columns of the ratio tokens before their own.
    static constexpr bool OVERLAP = Ratio == 4;
    static constexpr int WINDOW = OVERLAP ? 2 * Ratio : Ratio;
    static constexpr int TOKENS = WINDOW / Groups;
    float values[TOKENS], scores[TOKENS];

    // Tokens before the step (Old) and its own, at once or one after the other.
    template <bool Old, bool Own>
    __device__ __forceinline__ void load(const Compression& step, int start, int window,
                                         int channel) {
        const int group = threadIdx.x / (blockDim.x / Groups);
        const int width = step.rows.width;
        const int columns = OVERLAP ? 2 * width : width;
        const int first = Ratio * window - (WINDOW - Ratio);
        const int ring_first = (first + step.ring_slots) % step.ring_slots;
        // The position of the window's first token, which may lie before the step.
        const float* kv = step.kv + (int64)(first - start) * step.kv_stride;
        const float* score = step.score + (int64)(first - start) * step.score_stride;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const int nth = group * TOKENS + i, position = first + nth;
            const int column = channel + (OVERLAP && nth >= Ratio ? width : 0);
            const bool fresh = position >= start;
            if (!(fresh ? Own : Old)) continue;
            const bool seen = !OVERLAP || position >= 0;
            const int slot =
                ring_first + nth - (ring_first + nth >= step.ring_slots ? step.ring_slots : 0);
            const float* from_kv = fresh ? kv + (nth * step.kv_stride + column)
                                         : step.ring_kv + (slot * columns + column);
            const float* from_score = fresh ? score + (nth * step.score_stride + column)
                                            : step.ring_score + (slot * columns + column);
            values[i] = seen ? *from_kv : 0.0f;
            scores[i] = seen ? *from_score : __int_as_float(0xff800000);  // -∞
        }
        if (!Own) return;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const int nth = group * TOKENS + i;
            const int column = channel + (OVERLAP && nth >= Ratio ? width : 0);
            if (first + nth >= start) scores[i] += step.ape[nth % Ratio * columns + column];
        }
    }

    // torch: (softmax(score) * kv).sum over the tokens; valid in group 0. `partial`: 2 · blockDim.x
    // floats if Groups > 1.
    __device__ __forceinline__ float pooled(float* partial) const {
        const int lanes = blockDim.x / Groups;
        float largest = scores[0];
#pragma unroll
        for (int i = 1; i < TOKENS; ++i) largest = fmaxf(largest, scores[i]);
        if (Groups > 1) {
            partial[threadIdx.x] = largest;
            __syncthreads();
            for (int other = 0; other < Groups; ++other)
                largest = fmaxf(largest, partial[other * lanes + threadIdx.x % lanes]);
            __syncthreads();
        }
        float shares = 0.0f, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const float share = expf(scores[i] - largest);
            shares += share;
            sum = fmaf(share, values[i], sum);
        }
        if (Groups > 1) {
            float* partial_sum = partial + blockDim.x;
            partial[threadIdx.x] = shares, partial_sum[threadIdx.x] = sum;
            __syncthreads();
            shares = sum = 0.0f;
            for (int other = 0; other < Groups; ++other) {
                shares += partial[other * lanes + threadIdx.x % lanes];
                sum += partial_sum[other * lanes + threadIdx.x % lanes];
            }
            __syncthreads();
        }
        return sum / shares;
    }
};

// torch: hadamard(row), of a row in shared memory, by the block; ends with a barrier.
__device__ __forceinline__ void hadamard(float* row, int width, float normaliser, bool round) {
    if (width == 4 * WARP) {
        if (threadIdx.x < WARP) {
            const float4 own = reinterpret_cast<const float4*>(row)[threadIdx.x];
            float values[4] = {own.x, own.y, own.z, own.w};
            warp_hadamard<WARP>(values);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                row[4 * threadIdx.x + i] = rounded(values[i] * normaliser, round);
        }
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
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        row[i] = rounded(row[i] * normaliser, round);
    __syncthreads();
}

// The bits of a float rounded to bfloat16, by integer arithmetic: CUDA 13.0 compiles the low byte
// of a conversion to bfloat16 into another floating-point conversion.
__device__ __forceinline__ unsigned bf16_bits(float value) {
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
}

// Stores channels [first, first + channels) of a row as dsv4/caches/rows.py lays them out; `row`
// holds just these. For KV_FP8 `first` is a multiple of 64, for INDEX_FP8 the channels are the
// whole row.
__device__ __forceinline__ void store_channels(const float* row, int first, int channels,
                                               const RowStore& rows, int64 slot) {
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const int warps = blockDim.x / WARP;
    unsigned char* out = rows.row(slot);
    if (rows.format == ROW_BF16 || rows.format == ROW_F32) {
        for (int i = threadIdx.x; i < channels; i += blockDim.x) {
            if (rows.format == ROW_F32) reinterpret_cast<float*>(out)[first + i] = row[i];
            else reinterpret_cast<bf16*>(out)[first + i] = __float2bfloat16(row[i]);
        }
        return;
    }
    if (rows.format == ROW_INDEX_FP8) {
        // Every warp finds the scale, so that no barrier is needed. Bits of non-negative floats
        // compare like integers.
        unsigned peak_bits = 0;
        for (int i = lane; i < channels; i += WARP)
            peak_bits = max(peak_bits, __float_as_uint(fabsf(row[i])));
        const float peak = __uint_as_float(__reduce_max_sync(~0u, peak_bits));
        const float scale = peak > 0.0f ? __fdiv_rn(peak, E4M3_LARGEST) : 1.0f;
        for (int i = threadIdx.x; i < channels; i += blockDim.x)
            out[i] = float_to_e4m3(__fdiv_rn(row[i], scale));
        if (threadIdx.x == 0) *reinterpret_cast<float*>(rows.row_scale(slot)) = scale;
        return;
    }
    const int quantised = rows.quantised();
    const int groups = (quantised + KV_GROUP - 1) / KV_GROUP;
    unsigned char* scale = rows.row_scale(slot);
    for (int group = warp; group * KV_GROUP < channels && first + group * KV_GROUP < quantised;
         group += warps) {
        const int i = group * KV_GROUP + 2 * lane;
        const bool one = i < channels && first + i < quantised;
        const bool two = i + 1 < channels && first + i + 1 < quantised;
        int code;
        const unsigned short codes =
            encode_kv_group(one ? row[i] : 0.0f, two ? row[i + 1] : 0.0f, code);
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
        for (int group = groups + threadIdx.x; group < rows.scale_bytes(); group += blockDim.x)
            scale[group] = 0;
    }
}

// Shared floats of a block with `channels` channels and `threads` threads.
template <int Groups>
__host__ __device__ constexpr int window_floats(int channels, int threads) {
    return channels + (Groups > 1 ? 2 * threads : 0);
}

// Block `block` of the Blocks that make the nth window which the step may complete. If `store`, it
// also puts its columns of the nth token into the ring: then there are as many n as tokens. Calls
// pdl_launch() and pdl_wait(). `row`: window_floats. Early: tokens before the step are read in
// front of the wait.
template <int Ratio, int Groups, int Blocks, bool Early>
__device__ __forceinline__ void compress_window(const Compression& step,
                                                const settled_int64* positions, int block,
                                                int nth, bool store, float* row) {
    using Pool = ChannelPool<Ratio, Groups>;
    // The 128 tokens of the other windows would take more registers than there are, for one step in
    // 128.
    constexpr bool BEFORE_WAIT = Early && Pool::OVERLAP;
    __shared__ float scratch[WARP + 1], sums[Blocks];
    __shared__ uint64 inbox;
    const int width = step.rows.width;
    const int rope_width = step.rows.rope_width;
    const int columns = Pool::OVERLAP ? 2 * width : width;
    const int channels = width / Blocks;
    const int first = block * channels;
    const int lanes = blockDim.x / Groups;
    // The pair of channels that this thread turns.
    const int pair = threadIdx.x;
    const int turned = width - rope_width + 2 * pair - first;
    const bool turns = pair < rope_width / 2 && turned >= 0 && turned < channels;
    const float weight =
        threadIdx.x < channels ? fetch_constant(step.norm + first + threadIdx.x) : 0.0f;
    const float frequency = turns ? fetch_constant(step.inv_freq + pair) : 0.0f;
    if (Pool::OVERLAP) {
        for (int i = WARP * threadIdx.x; i < Ratio * columns; i += WARP * blockDim.x)
            prefetch_l2(step.ape + i);
    }
    if constexpr (Blocks > 1) {
        cluster_start(&inbox, 1);
        if (threadIdx.x == 0) expect_mail(&inbox, sizeof(sums));
    }
    pdl_launch();
    const int start = (int)fetch_settled(positions), window = start / Ratio + nth;
    const bool complete = (window + 1) * Ratio <= start + step.count && window < step.row_slots;
    Pool pool;
    Turn turn{1.0f, 0.0f};
    const auto channel = [&](int base) {
        return first + min(int(base + threadIdx.x % lanes), channels - 1);
    };
    if (complete) {
        if (BEFORE_WAIT) pool.template load<true, false>(step, start, window, channel(0));
        if (turns) turn = rope_turn((int64)window * Ratio, frequency);
    }
    pdl_wait();
    if constexpr (Blocks > 1) cluster_started();
    const auto store_share = [&] {
        if (store)
            store_in_ring<Ratio>(step, start, nth, block * (columns / Blocks), columns / Blocks,
                                 columns);
    };
    if (!complete) return store_share();
    float squares = 0.0f;
    for (int base = 0; base < channels; base += lanes) {
        const int i = base + threadIdx.x % lanes;
        if (BEFORE_WAIT && base > 0)
            pool.template load<true, false>(step, start, window, channel(base));
        pool.template load<!BEFORE_WAIT, true>(step, start, window, channel(base));
        float pooled = pool.pooled(row + channels);
        if (threadIdx.x < lanes && i < channels) {
            pooled = rounded(pooled, step.round);
            row[i] = pooled;
            squares += pooled * pooled;
        }
    }
    // After the pool's loads, which would otherwise wait for these.
    store_share();
    float total = block_sum(squares, scratch);
    if constexpr (Blocks > 1) {
        if (threadIdx.x < Blocks) send(&sums[cluster_rank()], &inbox, threadIdx.x, total);
        wait_mail(&inbox, 0);
        total = 0.0f;
        for (int other = 0; other < Blocks; ++other) total += sums[other];
    }
    const float inverse = rsqrtf(total / width + step.eps);
    for (int i = threadIdx.x; i < channels; i += blockDim.x) {
        row[i] = rounded(row[i] * inverse * (i < blockDim.x ? weight : step.norm[first + i]),
                         step.round);
    }
    __syncthreads();
    for (int i = pair; i < rope_width / 2; i += blockDim.x) {
        const int at = turned + 2 * (i - pair);
        if (at < 0 || at >= channels) continue;
        if (i != pair) turn = rope_turn((int64)window * Ratio, step.inv_freq[i]);
        const float2 both = rotate(row[at], row[at + 1], turn);
        row[at] = rounded(both.x, step.round), row[at + 1] = rounded(both.y, step.round);
    }
    __syncthreads();
    if (step.rotate_keys) hadamard(row, width, step.normaliser, step.round);
    store_channels(row, first, channels, step.rows, window);
}
