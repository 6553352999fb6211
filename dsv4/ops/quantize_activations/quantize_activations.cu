// Rows of bf16 activations as codes and scales for block-scaled tensor cores: the bytes of
// dsv4/ops/quantize_activations/__init__.py, scales in the 128 x 4 order (docs/model.md). One block
// per row, which is kept in registers; a thread has 8 neighbouring columns per access. Rows without
// values, up to a multiple of 128, get zeros.
//
// Defines: NVFP4 (else FP8), NORM (rows are normalised first), GROUPS accesses per thread, ALIGNED
// (rows begin at multiples of 16 bytes and have a multiple of 8 columns).
#include "columns.cuh"
#include "kv_rows.cuh"

constexpr int COUNT = 8;                       // columns of one access
constexpr int SCALED = NVFP4 ? 16 : 128;       // columns that share a scale
constexpr int ATOM_COLUMNS = NVFP4 ? 64 : 128; // columns of one word of four scales
constexpr int TILE = 128;                      // rows of an atom of scales, and of a tile of pairs
constexpr unsigned INFINITE = 0x7f80;          // bf16 magnitudes from here on are no numbers
constexpr float SMALLEST_AMAX = 7.888609052210118e-31f;  // 2^-100

// The larger one over neighbouring lanes, a power of two of them.
template <int Lanes>
__device__ __forceinline__ unsigned lanes_max(unsigned value) {
#pragma unroll
    for (int offset = Lanes / 2; offset > 0; offset /= 2)
        value = max(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}

// Over the block, for every thread.
__device__ __forceinline__ unsigned block_max(unsigned value, unsigned* scratch) {
    value = lanes_max<WARP>(value);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    return lanes_max<WARP>(lane < (int)blockDim.x / WARP ? scratch[lane] : 0);
}

// The largest magnitude of eight values as the bits of a bf16, which are ordered like the values.
__device__ __forceinline__ unsigned largest_bits(const Columns<COUNT>& values) {
    const unsigned* words = reinterpret_cast<const unsigned*>(&values.words);
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++)
        largest = max(largest, max(words[i] & 0x7fff, words[i] >> 16 & 0x7fff));
    return largest;
}

// E2M1 code to nearest, ties to even, 6 for more. Below 1 the code counts halves, which is where
// 2^22 + value is rounded to; above, it is the exponent and the first bit of the fraction.
__device__ __forceinline__ unsigned float_to_e2m1(float value) {
    const float magnitude = fminf(fabsf(value), 6.0f);
    const unsigned bits = __float_as_uint(magnitude);
    const unsigned halves = __float_as_uint(__fadd_rn(magnitude, 4194304.0f)) & 3;
    const unsigned rounded = (bits + 0x1fffff + (bits >> 22 & 1)) >> 22;
    const unsigned code = magnitude < 1.0f ? halves : rounded - 252;
    return code | __float_as_uint(value) >> 31 << 3;
}

__device__ __forceinline__ Columns<COUNT> load_row(const bf16* row, int first, int width) {
    Columns<COUNT> values{};
    if (ALIGNED) {
        if (first < width) values = load_columns<COUNT>(row + first);
    } else {
        unsigned short* each = reinterpret_cast<unsigned short*>(&values.words);
#pragma unroll
        for (int c = 0; c < COUNT; c++)
            if (first + c < width) each[c] = __bfloat16_as_ushort(row[first + c]);
    }
    return values;
}

// The arithmetic of norm/rms_norm.cu, sums in the same order.
__device__ __forceinline__ void normalise(Columns<COUNT> (&values)[GROUPS], const float* weight,
                                          int width, float eps) {
    __shared__ float scratch[WARP + 1];
    float squares = 0.0f;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int c = 0; c < COUNT; c++)
            squares = fmaf(column(values[g], c), column(values[g], c), squares);
    }
    const float inverse = rsqrtf(block_sum(squares, scratch) / width + eps);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int first = (g * blockDim.x + threadIdx.x) * COUNT;
        float scaled[COUNT];
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            const float factor = first + c < width ? __ldg(weight + first + c) : 0.0f;
            scaled[c] = column(values[g], c) * inverse * factor;
        }
        values[g] = round_columns(scaled);
    }
}

// Where the codes and scales of one row go. `scales` has its first word of four; the next one is
// 128 words further.
struct Target {
    unsigned char* codes;
    unsigned* scales;
};

__device__ __forceinline__ void store_fp8(const Columns<COUNT>& values, int first, int padded,
                                          const Target& target) {
    const unsigned amax = lanes_max<SCALED / COUNT>(largest_bits(values));
    const bool lost = amax >= INFINITE;
    const int scale = lost ? 255 : kv_scale_code(amax << 16);
    const float inverse = e8m0_reciprocal(lost ? 127 : scale);
    uint2 codes = make_uint2(0x7f7f7f7f, 0x7f7f7f7f);
    if (!lost) {
        unsigned short* pairs = reinterpret_cast<unsigned short*>(&codes);
#pragma unroll
        for (int c = 0; c < COUNT; c += 2)
            pairs[c / 2] = floats_to_e4m3x2(__fmul_rn(column(values, c), inverse),
                                            __fmul_rn(column(values, c + 1), inverse));
    }
    if (first >= padded) return;
    *reinterpret_cast<uint2*>(target.codes + first) = codes;
    if (first % ATOM_COLUMNS == 0)
        target.scales[first / ATOM_COLUMNS * TILE] = scale * 0x01010101u;
}

__device__ __forceinline__ void store_nvfp4(const Columns<COUNT>& values, int first, int padded,
                                            float total, const Target& target) {
    const unsigned amax = lanes_max<SCALED / COUNT>(largest_bits(values));
    const float per_total = __frcp_rn(__fmul_rn(6.0f, total));
    const float exact = __fmul_rn(__uint_as_float(amax << 16), per_total);
    const bool lost = amax >= INFINITE || total != total;
    const unsigned scale = lost ? 0x7f : float_to_e4m3(exact);
    unsigned codes = 0;
    if (!lost && scale != 0) {
        const float inverse = __frcp_rn(__fmul_rn(e4m3_to_float(scale), total));
#pragma unroll
        for (int c = 0; c < COUNT; c++)
            codes |= float_to_e2m1(__fmul_rn(column(values, c), inverse)) << 4 * c;
    }
    // Four scales of eight lanes.
    unsigned word = scale << 8 * (threadIdx.x / 2 % 4);
    word |= __shfl_xor_sync(~0u, word, 2);
    word |= __shfl_xor_sync(~0u, word, 4);
    if (first >= padded) return;
    *reinterpret_cast<unsigned*>(target.codes + first / 2) = codes;
    if (first % ATOM_COLUMNS == 0) target.scales[first / ATOM_COLUMNS * TILE] = word;
}

// One row of `width` columns, nullptr for zeros, as row `at` of the result.
__device__ __forceinline__ void quantize_row(const bf16* row, const float* norm_weight, int64 at,
                                             unsigned char* codes, unsigned* scales,
                                             float* global_scale, int width, float eps,
                                             float fixed_scale) {
    __shared__ unsigned scratch[WARP];
    const int padded = (width + ATOM_COLUMNS - 1) / ATOM_COLUMNS * ATOM_COLUMNS;
    const int in_tile = at % TILE;
    const Target target = {
        codes + at * (NVFP4 ? padded / 2 : padded),
        scales + at / TILE * (padded / ATOM_COLUMNS * TILE) + in_tile % 32 * 4 + in_tile / 32};
    if (row == nullptr) {
        const int words = padded / (NVFP4 ? 8 : 4);
        for (int i = threadIdx.x; i < words; i += blockDim.x)
            reinterpret_cast<unsigned*>(target.codes)[i] = 0;
        for (int i = threadIdx.x; i < padded / ATOM_COLUMNS; i += blockDim.x)
            target.scales[i * TILE] = 0;
        if (NVFP4 && threadIdx.x == 0) global_scale[at] = 0.0f;
        return;
    }
    Columns<COUNT> values[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
        values[g] = load_row(row, (g * blockDim.x + threadIdx.x) * COUNT, width);
    if (NORM) normalise(values, norm_weight, width, eps);
    float total = fixed_scale;
    if (NVFP4 && fixed_scale == 0.0f) {
        unsigned largest = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) largest = max(largest, largest_bits(values[g]));
        largest = block_max(largest, scratch);
        const float amax = fmaxf(__uint_as_float(largest << 16), SMALLEST_AMAX);
        total = largest >= INFINITE ? __int_as_float(0x7fffffff)
                                    : __fmul_rn(amax, (float)(1.0 / 2688.0));
    }
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int first = (g * blockDim.x + threadIdx.x) * COUNT;
        if (NVFP4)
            store_nvfp4(values[g], first, padded, total, target);
        else
            store_fp8(values[g], first, padded, target);
    }
    if (NVFP4 && threadIdx.x == 0) global_scale[at] = total;
}

// x [tokens, width], its rows x_stride apart. codes [rows, padded width], scales in words of four,
// global_scale [rows] (NVFP4); rows is the number of blocks. fixed_scale: every row's global scale,
// 0 to take it from the row.
extern "C" __global__ void __launch_bounds__(1024)
    quantize_rows(const bf16* x, const float* norm_weight, unsigned char* codes, unsigned* scales,
                  float* global_scale, int tokens, int width, int x_stride, float eps,
                  float fixed_scale) {
    pdl_launch();
    pdl_wait();
    const int at = blockIdx.x;
    const bf16* row = at < tokens ? x + (int64)at * x_stride : nullptr;
    quantize_row(row, norm_weight, at, codes, scales, global_scale, width, eps, fixed_scale);
}

// The rows of (token, slot) pairs in expert order, those of tile i from row 128 * i on: slots,
// tiles and tile_count are what moe_sort writes.
extern "C" __global__ void __launch_bounds__(1024)
    quantize_sorted_rows(const bf16* x, const int* slots, const int4* tiles, const int* tile_count,
                         unsigned char* codes, unsigned* scales, float* global_scale, int width,
                         int x_stride, int per_token) {
    pdl_launch();
    pdl_wait();
    const int tile = blockIdx.x / TILE;
    if (tile >= *tile_count) return;
    const int4 pairs = tiles[tile];  // {expert, first, pairs, 0}
    const int in_tile = blockIdx.x % TILE;
    const bf16* row = nullptr;
    if (in_tile < pairs.z) row = x + (int64)(slots[pairs.y + in_tile] / per_token) * x_stride;
    quantize_row(row, nullptr, blockIdx.x, codes, scales, global_scale, width, 0.0f, 0.0f);
}
