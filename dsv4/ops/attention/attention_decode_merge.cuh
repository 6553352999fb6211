// How the blocks of a cluster of attention_decode, and the clusters that share keys, merge what
// they have, and how the result is stored.
#pragma once
#include "attention_decode_softmax.cuh"

// ---- what a block sends -------------------------------------------------------------------------

// Every thread of the cluster, long before the first part is sent.
__device__ __forceinline__ void expect_parts(Shared& shared) {
    cluster_start(&shared.merged, 1);
    if (threadIdx.x == 0)
        expect_mail(&shared.merged, sizeof(Shared::merge) + sizeof(Shared::merge_scale) +
                                        sizeof(Shared::peak_sum));
}

// The float32 exponent of the largest of the warp's results.
__device__ __forceinline__ unsigned largest_exponent(const float (&result)[NTILES][4]) {
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
    const unsigned exponent = largest_of(false) >> 23;
    // One head's NaN must not cost the others their digits.
    return exponent == 255 ? largest_of(true) >> 23 : exponent;
}

// Each block sends every other, and itself, the pieces that the other finishes: f16, relative to
// the warp's largest. A block without keys sends zeros.
__device__ __forceinline__ void send_parts(const float (&result)[NTILES][4], const Softmax& softmax,
                                           int rank, Shared& shared) {
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    // The largest becomes less than 2^15; below 2^-100 nothing is lost that matters.
    const unsigned exponent = max(largest_exponent(result), 27u);
    const float shrink = __uint_as_float((268 - exponent) << 23);
    const float grow = __uint_as_float((exponent - 14) << 23);
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
        send(&shared.merge[rank][at][lane], &shared.merged, target,
             make_uint4(packed[0], packed[1], packed[2], packed[3]));
        if (lane == 0) send(&shared.merge_scale[rank][at], &shared.merged, target, grow);
    }
    if (threadIdx.x % LANES < CLUSTER)
        send(&shared.peak_sum[rank][threadIdx.x / LANES], &shared.merged, threadIdx.x % LANES,
             make_float2(softmax.peak, softmax.sum));
}

// ---- what a thread finishes ---------------------------------------------------------------------

// OUT of piece `slot` of lane `lane`, from value `dim` of head `head` of the block's on. A piece is
// half of the values that a lane of p·v has of one head (8 warps), or all of them (16 warps).
struct Owned {
    int slot, lane, head, dim;

    __device__ __forceinline__ explicit Owned(int rank) {
        slot = threadIdx.x * OUT / (WARP * PIECE);
        lane = threadIdx.x * OUT / PIECE % WARP;
        const int warp = (slot * CLUSTER + rank) / PIECES;
        const int piece = (slot * CLUSTER + rank) % PIECES;
        head = lane / 4 + 8 * (piece * 2 / PIECES);
        dim = 8 * NTILES * warp + 2 * NTILES * (lane % 4) + piece % (PIECES / 2) * PIECE +
              threadIdx.x * OUT % PIECE;
    }
};

// out_HD and denominator_H, relative to 2^peak_H: the thread's values of one head.
struct Merged {
    float values[OUT] = {}, peak, denominator = 0.0f;

    // Those of all blocks of the cluster, whose sinks count for the peak.
    __device__ __forceinline__ void add_blocks(const Owned& owned, float sink_log2,
                                               const Shared& shared) {
        float2 parts[CLUSTER];
        peak = sink_log2;
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) {
            parts[block] = shared.peak_sum[block][owned.head];
            peak = fmaxf(peak, parts[block].x);
        }
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) {
            const float share = exp2_fast(parts[block].x - peak);
            const float factor = share * shared.merge_scale[block][owned.slot];
            denominator += parts[block].y * share;
            const __half2* from =
                reinterpret_cast<const __half2*>(&shared.merge[block][owned.slot][owned.lane]);
#pragma unroll
            for (int i = 0; i < OUT; i += 2) {
                const float2 pair = __half22float2(from[(threadIdx.x * OUT % PIECE + i) / 2]);
                values[i] += factor * pair.x;
                values[i + 1] += factor * pair.y;
            }
        }
    }

    // Leaves what this block has finished for the last of the SPLITS blocks that have finished the
    // same values, which sets shared.last and gets the sum of all. The order of the sum is that of
    // the splits.
    __device__ __forceinline__ void add_splits(float* partial, int* counters, int rank, int split,
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
                found[other][i] =
                    __ldcg(reinterpret_cast<const float2*>(records + other * STRIDE) + i);
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

    // out_HD = rope(out_HD / denominator_H, position, inverse=True), with the sink's part of the
    // denominator; `to`: where the thread's values go.
    __device__ __forceinline__ void store(bf16* to, int dim, float sink_log2,
                                          const Shared& shared) const {
        const float normaliser = 1.0f / (denominator + exp2_fast(sink_log2 - peak));
#pragma unroll
        for (int i = 0; i < OUT; i += 2) {
            __nv_bfloat162 rounded =
                __floats2bfloat162_rn(values[i] * normaliser, values[i + 1] * normaliser);
            if (dim >= DIM - ROTARY) {
                const float2 pair = __bfloat1622float2(rounded);
                const Turn turn = shared.turns[(dim - (DIM - ROTARY) + i) / 2];
                const float2 turned = rotate(pair.x, pair.y, turn);
                rounded = __floats2bfloat162_rn(turned.x, turned.y);
            }
            *reinterpret_cast<__nv_bfloat162*>(to + i) = rounded;
        }
    }
};
