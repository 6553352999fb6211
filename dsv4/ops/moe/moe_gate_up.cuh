// The first phase of the experts' decode launch: h, from x and the rows of w1 and w3.
//
// Defines: those of moe_decode.cu.
#pragma once
#include "moe_block.cuh"
#include "moe_gate_up_items.cuh"
#include "moe_inputs.cuh"
#include "moe_layout.cuh"
#include "moe_products.cuh"
#include "moe_swiglu.cuh"
#include "ptx.cuh"

// Stages of w1 and w3 on their way to the ring of a warp.
struct GateUpStream {
    Block block;
    Experts routed_weights, shared_weights;
    Layout<ROUTED> routed;
    Layout<SHARED> shared;
    // At the stage that is requested next.
    GateUpItems items;
    // Empty slots of the ring. The last STAGES groups of copies are those of the next STAGES
    // stages, in order.
    int vacant;

    __device__ __forceinline__ GateUpStream(const Block& of, const Experts& of_routed,
                                            const Experts& of_shared)
        : block(of), routed_weights(of_routed), shared_weights(of_shared), routed(INNER, WIDTH),
          shared(INNER, WIDTH), items((INNER + 63) / 64 * 4, shared.stages(), routed.stages(),
                                      shared.tile_bytes + shared.scale_tile_bytes,
                                      routed.tile_bytes + routed.scale_tile_bytes, of.warp),
          vacant(0) {}

    __device__ __forceinline__ void request(int place) {
        const int lane = block.lane;
        const unsigned slot = block.ring + place * PAIR_BYTES;
        if (items.slot < 0) {
            shared.fetch(slot, shared_weights.w1.data, shared_weights.w1.block_scale, 0, items.tile,
                         items.stage, lane);
            shared.fetch(slot + TILE_BYTES, shared_weights.w3.data, shared_weights.w3.block_scale,
                         0, items.tile, items.stage, lane);
        } else {
            const int expert = block.table.expert(items.slot);
            routed.fetch(slot, routed_weights.w1.data, routed_weights.w1.block_scale, expert,
                         items.tile, items.stage, lane);
            routed.fetch(slot + TILE_BYTES, routed_weights.w3.data, routed_weights.w3.block_scale,
                         expert, items.tile, items.stage, lane);
        }
        items.stage += WARPS;
        items.settle();
    }

    // The first stages, of the shared expert.
    __device__ __forceinline__ void start() {
        items.settle();
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) refill(i);
    }

    // A slot whose stage has been multiplied.
    __device__ __forceinline__ void refill(int place) {
        if (items.active()) request(place);
        else ++vacant;
        cp_async_commit();
    }

    // Once the number of routed tiles is known; `place`: the slot of the next stage.
    __device__ __forceinline__ void start_routed(int tiles, int place) {
        items.start_routed(tiles);
        items.settle();
#pragma unroll 1
        for (; vacant > 0; --vacant) {
            if (items.active()) request((place + STAGES - vacant) % STAGES);
            cp_async_commit();
        }
    }
};

// The products with the stages of a warp, and what becomes of their sums.
struct GateUp {
    Block block;
    GateUpStream& stream;
    // At the stage that is multiplied next.
    GateUpItems items;
    // Where the lane reads the activations of the first 32 columns.
    unsigned x_f16, x_bf16;
    // 1 / (what x of a token has been multiplied with)
    const float* unscale;
    char* h;
    float limit;

    // All of h that the block has to compute. Returns the number of its items. `sums`: zeros.
    __device__ __forceinline__ int compute(Sums& sums) {
        // `part`: the first stage of this warp in the item, or where it would be.
        int place = 0, part = block.warp;
        bool routes_known = false;
        // gate, up = x_TE[mask] @ w1.T, x_TE[mask] @ w3.T for shared and every one of experts.
        // A turn is a stage of this warp or the end of an item. The shared expert's stages do not
        // wait for the routes.
#pragma unroll 1
        while (true) {
            const unsigned known = block.barriers.known;
            if (!routes_known && (!items.active() || __any_sync(~0u, barrier_test(known, 0)))) {
                barrier_wait(known, 0);
                routes_known = true;
                const int tiles = block.routes.count * items.tiles;
                items.start_routed(tiles);
                stream.start_routed(tiles, place);
            }
            if (!items.active()) break;
            if (items.stage < items.stages()) {
                const unsigned slot = block.ring + place * PAIR_BYTES;
                cp_async_wait<STAGES - 1>();
                __syncwarp();
                multiply(sums, slot);
                __syncwarp();
                stream.refill(place);
                if (++place == STAGES) place = 0;
                items.stage += WARPS;
            } else {
                items.stage -= items.stages();
                // The item before is finished now, when no warp is likely to be behind in it:
                // waiting here would add up.
                block.partials.put(items.number, sums, part, block.lane);
                part = items.stage;
                finish(items.number - 1);
                items.next_item();
                sums = {};
            }
        }
        finish(items.number - 1);
        return items.number;
    }

    // sums += the stage in a slot of the ring times x.
    __device__ __forceinline__ void multiply(Sums& sums, unsigned slot) const {
        if (items.slot < 0) multiply_stage<SHARED>(sums, slot, activations<SHARED>(), block.lane);
        else multiply_stage<ROUTED>(sums, slot, activations<ROUTED>(), block.lane);
    }

    template <int FORMAT>
    __device__ __forceinline__ Activations activations() const {
        const unsigned x = FORMAT == BF16 ? x_bf16 : x_f16;
        return {x + items.stage * (Stage<FORMAT>::COLUMNS * 2) * block.T, block.no_activations,
                block.T * 64, true};
    }

    // h[rows of the expert] = (silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) *
    // weight).bfloat16()
    __device__ __forceinline__ void finish(int number) const {
        if (number < 0 || !Partials::mine(number, block.warp)) return;
        GateUpItems past = items;
        past.number = number;
        past.place();
        const bool is_shared = past.slot < 0;
        const Routes& routes = block.routes;
        const Partials& partials = block.partials;
        const Experts &shared = stream.shared_weights, &routed = stream.routed_weights;
        const int T = block.T, lane = block.lane;
        // Up and gate rows may have different global scales.
        const float* shared_global = lane < 16 ? shared.w1.global_scale : shared.w3.global_scale;
        const float* routed_global = lane < 16 ? routed.w1.global_scale : routed.w3.global_scale;
        float global_scale = is_shared ? format_factor<SHARED>() : format_factor<ROUTED>();
        if (is_shared && SHARED == NVFP4) global_scale *= __ldg(shared_global);
        if (!is_shared && ROUTED == NVFP4)
            global_scale *= __ldg(routed_global + routes.experts[past.slot]);
        // The shared expert's hidden rows, too, are scaled by what the routes allow.
        barrier_wait(block.barriers.weighed, 0);
        partials.begin_get(number);
        if (is_shared)
            write_hidden<SHARED>(partials, number, routes, unscale, global_scale, (1u << T) - 1, -1,
                                 past.tile, h, T, INNER, limit, lane);
        else
            write_hidden<ROUTED>(partials, number, routes, unscale, global_scale,
                                 routes.mask[past.slot], past.slot, past.tile, h, T, INNER, limit,
                                 lane);
        partials.end_get(number, lane);
    }
};
