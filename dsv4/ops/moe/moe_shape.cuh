// What the parts of the experts' decode launch have in common: its shape, and the ring of weights.
//
// Defines: those of moe_decode.cu.
#pragma once
#include "weight_tile.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int MAX_TOKENS = MAX_DECODE_TOKENS;
constexpr bool ANY_BF16 = ROUTED == BF16 || SHARED == BF16;
constexpr bool ANY_F16 = ROUTED != BF16 || SHARED != BF16;

// Both row tiles of a stage begin on a line of shared memory, so that a line of weights is copied
// into one line.
constexpr int TILE_BYTES = slot_bytes(ROUTED, SHARED), PAIR_BYTES = 2 * TILE_BYTES;
constexpr int STAGE_COLUMNS = Stage<ROUTED>::COLUMNS > Stage<SHARED>::COLUMNS
                                  ? Stage<ROUTED>::COLUMNS
                                  : Stage<SHARED>::COLUMNS;
