// The first phase of the experts' decode launch: which products a block computes, in which order.
//
// Defines: those of moe_decode.cu.
#pragma once
#include "divisor.cuh"
#include "moe_routes.cuh"

// The items of a block: first its share of the shared expert's tiles, then routed tiles. The routed
// ones are dealt in rounds, so that all blocks get nearly equal bytes: blocks that have one shared
// tile more ("late") sit out the first `skipped` + 1 rounds, about as long as their extra tile
// takes.
struct GateUpItems {
    int number, tile, slot, stage;
    int tiles, shared_tiles, shared_stages, routed_stages;
    int routed_items, late, first, skipped;
    Divisor by_tiles;

    __device__ __forceinline__ GateUpItems(int row_tiles, int shared_n, int routed_n,
                                           int shared_bytes, int routed_bytes, int warp)
        : by_tiles(row_tiles) {
        const int blocks = BLOCKS, block = blockIdx.x;
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
        tile = blockIdx.x + number * BLOCKS;
        if (round >= 0) {
            // In early rounds the late blocks take nothing.
            const int item =
                first + round * BLOCKS - (skipped < 0 ? 0 : min(round, skipped) * late);
            slot = item < routed_items ? by_tiles.divide(item) : MAX_ENTRIES;
            tile = item - slot * tiles;
        }
    }

    __device__ __forceinline__ bool active() const { return slot < MAX_ENTRIES; }
    __device__ __forceinline__ int stages() const {
        return slot < 0 ? shared_stages : routed_stages;
    }

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
