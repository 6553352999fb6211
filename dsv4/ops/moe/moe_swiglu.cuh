// What becomes of finished sums of gate and up: rows of h.
//
// Defines: those of moe_decode.cu.
#pragma once
#include "f16_factor.cuh"
#include "hand_over.cuh"
#include "moe_products.cuh"
#include "moe_routes.cuh"
#include "moe_sums.cuh"

// silu(min(gate, limit)) * clamp(up, -limit, limit) * weight; NaN stays NaN.
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float weight, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.0f + expf(-gate)) * up * weight;
}

// One finished item: lanes 0..15 hold the gate rows, lanes 16..31 the up rows.
template <int FORMAT>
__device__ __forceinline__ void write_hidden(const Partials& partials, int item,
                                             const Routes& routes, const float* unscale,
                                             float global_scale, unsigned mask, int slot, int tile,
                                             char* h, int T, int F, float limit, int lane) {
    const int rows = __popc(mask);
    const int padded = (F + 63) / 64 * 64;
    // Four lanes have two pairs of rows each whose words are neighbours: the next two rows, or the
    // two that are 8 rows on.
    constexpr int NEXT = SPREADS ? 2 : 8;
    const int pair = lane / 2 % 8;
    const bool publishes = SPREADS ? lane < 16 && lane % 4 == 0 : lane < 8 && lane % 2 == 0;
    char* to = h + size_t(slot < 0 ? 0 : routes.first_row[slot]) * padded * 2 +
               size_t(tile >> 1) * rows * 64 + word_at((tile & 1) * 8 + pair);
    for (int token = 0; token < T; ++token) {
        if (!(mask >> token & 1)) continue;
        float value = partials.get(item, token, lane) * global_scale;
        if (FORMAT != BF16) value *= unscale[token];
        const float up = __shfl_xor_sync(~0u, value, 16);
        const float weight = slot < 0 ? 1.0f : routes.weight[slot][token];
        const bf16 hidden = __float2bfloat16_rn(clamped_swiglu(value, up, weight, limit));
        const unsigned bits = FORMAT == BF16
                                  ? __bfloat16_as_ushort(hidden)
                                  : __half_as_ushort(__float2half_rn(
                                        __bfloat162float(hidden) *
                                        inverse_power(routes.unscale[token])));
        const unsigned word = bits | __shfl_down_sync(~0u, bits, 1) << 16;
        const unsigned next = __shfl_down_sync(~0u, word, NEXT);
        if (publishes) publish(to, word, next);
        to += 64;
    }
}
