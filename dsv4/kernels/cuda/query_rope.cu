// The inputs of attention: queries normalised per head without a weight, rounded and rotated (dsv4/ops/rope.py,
// query_rope), and, in the same launch, the window key row (dsv4/ops/kv_write.py). One warp per row of WIDTH values.
#include "kv_rows.cuh"
#include "rope.cuh"

#ifndef WIDTH
#define WIDTH 512
#endif
#ifndef ROPE
#define ROPE 64
#endif

namespace {

constexpr int VECTOR = 8;  // bf16 values in 16 bytes
constexpr int CHUNKS = WIDTH / VECTOR, PER_LANE = (CHUNKS + WARP - 1) / WARP, FIRST_ROTARY = (WIDTH - ROPE) / VECTOR;

union Packed {
    uint4 raw;
    __nv_bfloat162 pairs[VECTOR / 2];
};

// Chunks lane, lane + 32, ... of a row.
struct Row {
    Packed values[PER_LANE];

    __device__ __forceinline__ void load(const bf16* row) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int chunk = threadIdx.x % WARP + i * WARP;
            values[i].raw = chunk < CHUNKS ? load_stream(row + chunk * VECTOR) : make_uint4(0, 0, 0, 0);
        }
    }

    // rms_norm with an optional weight, rounded to bf16.
    __device__ __forceinline__ void normalise(const float* weight, float eps) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
#pragma unroll
            for (int j = 0; j < VECTOR / 2; ++j) {
                const float2 pair = __bfloat1622float2(values[i].pairs[j]);
                squares += pair.x * pair.x + pair.y * pair.y;
            }
        }
        const float inverse = rsqrtf(warp_sum(squares) / WIDTH + eps);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int chunk = threadIdx.x % WARP + i * WARP;
            if (chunk >= CHUNKS) continue;
#pragma unroll
            for (int j = 0; j < VECTOR / 2; ++j) {
                const float2 pair = __bfloat1622float2(values[i].pairs[j]);
                float2 factor = make_float2(1.0f, 1.0f);
                if (weight) factor = *reinterpret_cast<const float2*>(weight + chunk * VECTOR + 2 * j);
                values[i].pairs[j] =
                    __floats2bfloat162_rn(pair.x * inverse * factor.x, pair.y * inverse * factor.y);
            }
        }
    }

    __device__ __forceinline__ void rotate_by(const Turn (&turns)[PER_LANE][VECTOR / 2]) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int chunk = threadIdx.x % WARP + i * WARP;
            if ((i + 1) * WARP <= FIRST_ROTARY || chunk < FIRST_ROTARY || chunk >= CHUNKS) continue;
#pragma unroll
            for (int j = 0; j < VECTOR / 2; ++j) {
                const float2 pair = __bfloat1622float2(values[i].pairs[j]);
                const float2 turned = rotate(pair.x, pair.y, turns[i][j]);
                values[i].pairs[j] = __floats2bfloat162_rn(turned.x, turned.y);
            }
        }
    }

    __device__ __forceinline__ void store(bf16* row) const {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int chunk = threadIdx.x % WARP + i * WARP;
            if (chunk < CHUNKS) *reinterpret_cast<uint4*>(row + chunk * VECTOR) = values[i].raw;
        }
    }

    // As store_row of kv_rows.cuh: a group of 64 values is the chunks of 8 neighbouring lanes.
    __device__ __forceinline__ void store_key(const RowStore& rows, int64 slot) const {
        unsigned char* out = rows.row(slot);
        if (rows.format == ROW_BF16) return store(reinterpret_cast<bf16*>(out));
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int chunk = threadIdx.x % WARP + i * WARP;
            float2 pairs[VECTOR / 2];
            unsigned amax = 0;
#pragma unroll
            for (int j = 0; j < VECTOR / 2; ++j) {
                pairs[j] = __bfloat1622float2(values[i].pairs[j]);
                amax = max(amax, max(__float_as_uint(fabsf(pairs[j].x)), __float_as_uint(fabsf(pairs[j].y))));
            }
            if (rows.format == ROW_F32) {
#pragma unroll
                for (int j = 0; j < VECTOR / 2 && chunk < CHUNKS; ++j) {
                    *reinterpret_cast<float2*>(reinterpret_cast<float*>(out) + chunk * VECTOR + 2 * j) = pairs[j];
                }
                continue;
            }
#pragma unroll
            for (int offset = 1; offset < KV_GROUP / VECTOR; offset *= 2) {
                amax = max(amax, __shfl_xor_sync(~0u, amax, offset));
            }
            if (chunk >= FIRST_ROTARY) {
                if (chunk < CHUNKS) *reinterpret_cast<uint4*>(out + chunk * VECTOR + (chunk - FIRST_ROTARY) * VECTOR) = values[i].raw;
                continue;
            }
            const int code = kv_scale_code(amax);
            const float factor = e8m0_reciprocal(code);
            uint2 codes = make_uint2(0, 0);
            codes.x = floats_to_e4m3x2(pairs[0].x * factor, pairs[0].y * factor) |
                      (unsigned)floats_to_e4m3x2(pairs[1].x * factor, pairs[1].y * factor) << 16;
            codes.y = floats_to_e4m3x2(pairs[2].x * factor, pairs[2].y * factor) |
                      (unsigned)floats_to_e4m3x2(pairs[3].x * factor, pairs[3].y * factor) << 16;
            *reinterpret_cast<uint2*>(out + chunk * VECTOR) = codes;
            if (chunk % (KV_GROUP / VECTOR) == 0) rows.row_scale(slot)[chunk / (KV_GROUP / VECTOR)] = code;
        }
        if (rows.format != ROW_KV_FP8) return;
        const int scales = (WIDTH - ROPE) / KV_GROUP;
        for (int i = scales + threadIdx.x % WARP; i < rows.scale_bytes(); i += WARP) rows.row_scale(slot)[i] = 0;
    }
};

}  // namespace

// Block (x, y): `rows_per_block` rows from x · rows_per_block on, of token y. Rows are the token's `heads` queries and,
// where `kv` is not null, the key row, which goes to slot position mod `slots` of the ring. Widths are multiples of 8;
// for fp8 rows WIDTH − ROPE is a multiple of 64.
extern "C" __global__ void __launch_bounds__(256) query_rope(
    const bf16* q, const int64* positions, const float* inv_freq, bf16* out, const bf16* kv, const float* norm_weight,
    unsigned char* ring_data, unsigned char* ring_scale, int format, int slots, int heads, int rows_per_block, float eps) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int64 token = blockIdx.y;
    const int first = blockIdx.x * rows_per_block, stop = min(first + rows_per_block, heads + (kv ? 1 : 0));
    pdl_launch();
    if (kv && stop > heads) {
        for (int i = threadIdx.x * WARP; i < WIDTH; i += blockDim.x * WARP) prefetch_l2(norm_weight + i);
    }
    pdl_wait();
    const int64 position = positions[token];
    Turn turns[PER_LANE][VECTOR / 2];
    for (int index = first + warp; index < stop; index += warps) {
        const bool key = index == heads;
        Row row;
        row.load(key ? kv + token * WIDTH : q + (token * heads + index) * WIDTH);
        if (index == first + warp) {
            // The same for every row of the token; computed while the first row is on its way.
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                const int pair = (lane + i * WARP - FIRST_ROTARY) * (VECTOR / 2);
                if ((i + 1) * WARP <= FIRST_ROTARY || pair < 0 || lane + i * WARP >= CHUNKS) continue;
#pragma unroll
                for (int j = 0; j < VECTOR / 2; ++j) turns[i][j] = rope_turn(position, inv_freq[pair + j]);
            }
        }
        row.normalise(key ? norm_weight : nullptr, eps);
        row.rotate_by(turns);
        if (key) {
            row.store_key(RowStore{ring_data, ring_scale, format, WIDTH, ROPE}, position % slots);
        } else {
            row.store(out + (token * heads + index) * WIDTH);
        }
    }
}

// Queries of any width up to 4096 and any even rotary width. One block per head (x) and token (y).
extern "C" __global__ void __launch_bounds__(128) query_rope_any(const bf16* q, const int64* positions,
                                                                 const float* inv_freq, bf16* out, int heads, int width,
                                                                 int rope_width, float eps) {
    __shared__ float scratch[WARP + 1];
    pdl_launch();
    pdl_wait();
    const int64 position = positions[blockIdx.y], start = ((int64)blockIdx.y * heads + blockIdx.x) * width;
    float squares = 0.0f;
    for (int d = threadIdx.x; d < width; d += blockDim.x) {
        const float value = __bfloat162float(q[start + d]);
        squares += value * value;
    }
    const float inverse = rsqrtf(block_sum(squares, scratch) / width + eps);
    const auto normalised = [&](int d) { return __float2bfloat16(__bfloat162float(q[start + d]) * inverse); };
    const int plain = width - rope_width;
    for (int d = threadIdx.x; d < plain; d += blockDim.x) out[start + d] = normalised(d);
    for (int pair = threadIdx.x; pair < rope_width / 2; pair += blockDim.x) {
        const int d = plain + 2 * pair;
        const float2 turned = rotate(__bfloat162float(normalised(d)), __bfloat162float(normalised(d + 1)),
                                     rope_turn(position, inv_freq[pair]));
        out[start + d] = __float2bfloat16(turned.x);
        out[start + d + 1] = __float2bfloat16(turned.y);
    }
}
