// Which tokens of a prefill step are a rank's (dsv4/ops/exchange/token_share.py).
//
// Defines: OWNERS, of tokens that ranks share.
#pragma once
#include "common.cuh"

#ifndef OWNERS
#define OWNERS 1
#endif

// The token of a rank's `own`-th row, where the ranks take tiles of tokens in turn.
__device__ __forceinline__ int64 own_token(int64 own, int owner) {
    if (OWNERS == 1) return own;
    return (own / TOKEN_TILE * OWNERS + owner) * TOKEN_TILE + own % TOKEN_TILE;
}
