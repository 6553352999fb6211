// Steps of the second phase of the experts' decode launch: what a stage's products need, on its way
// to the warp, and what becomes of their sums.
//
// Defines: those of moe_decode.cu.
#pragma once
#include "exchange.cuh"
#include "moe_block.cuh"
#include "moe_down_line.cuh"
#include "moe_layout.cuh"
#include "moe_shape.cuh"
#include "ptx.cuh"

// The rows of w2 of the shared expert and of all others.
struct DownWeights {
    const Block& block;
    const PackedMatrix &routed_w2, &shared_w2;
    Layout<ROUTED> routed;
    Layout<SHARED> shared;

    // Row tiles `begin` to `end` of the two of a stage, to a place of the warp's ring.
    __device__ __forceinline__ void request(const DownStage& from, int place, int begin,
                                            int end) const {
        const unsigned to = block.ring + place * PAIR_BYTES;
        if (from.slot < 0) {
#pragma unroll
            for (int tile = begin; tile < end; ++tile)
                shared.fetch(to + tile * TILE_BYTES, shared_w2.data, shared_w2.block_scale, 0,
                             2 * from.pair + tile, from.stage, block.lane);
        } else {
            const int expert = block.table.expert(from.slot);
#pragma unroll
            for (int tile = begin; tile < end; ++tile)
                routed.fetch(to + tile * TILE_BYTES, routed_w2.data, routed_w2.block_scale, expert,
                             2 * from.pair + tile, from.stage, block.lane);
        }
    }
};

// Each of T warps adds the parts of a batch to y of its token, one after the other.
struct DownSums {
    const Block& block;
    const DownLine& line;
    SumExchange between;
    // The number of the first batch among the items of Partials.
    int first_item;
    const Outbox& outbox;
    bf16* y_TE;
    // The warp's token, if there is one.
    int own;
    float sum;

    // y_TE = y.bfloat16(), or this rank's part of y for all ranks
    __device__ __forceinline__ void store(int token, int row, float value) const {
        const size_t at = size_t(token) * WIDTH + row;
        if constexpr (RANKS > 1) outbox.push(at, value);
        else y_TE[at] = __float2bfloat16_rn(value);
    }

    __device__ __forceinline__ void finish(int batch) {
        const int T = block.T, lane = block.lane;
        if (batch < 0 || own >= T) return;
        const int first = batch * ROUNDS * WARPS;
        const int end = min(first + ROUNDS * WARPS, line.count);
        const float* from = block.partials.row(batch % BATCHES * ROUNDS * WARPS, lane) + own * 16 -
                            first * PARTIAL;
        int index = first;
        DownRun run = line.run(index, end);
        block.partials.begin_get(first_item + batch);
#pragma unroll 1
        while (true) {
            if (run.receives) sum = between.receive(blockIdx.x * T + own, lane);
            else if (run.starts) sum = 0.0f;
#pragma unroll 16
            for (int part = 0; part < run.parts; ++part) sum += from[(index + part) * PARTIAL];
            const int row = run.pair * 32 + lane;
            if (run.sends) between.send((blockIdx.x + 1) * T + own, lane, sum);
            else if (run.completes && row < WIDTH)
                store(own, row, sum * block.routes.unscale[own]);
            index += run.parts;
            if (index >= end) break;
            run = line.run(index, end);
        }
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(block.barriers.added + 8 * (batch % BATCHES));
    }
};
