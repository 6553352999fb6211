// Window key rows (dsv4/ops/kv_write/__init__.py): normalise, rotate, quantise, store at position
// mod slots. One block per token.
#include "kv_rows.cuh"
#include "rope.cuh"

constexpr int WIDEST_ROW = 4096;

__device__ __forceinline__ void write_row(const bf16* kv, const float* norm_weight,
                                          const int64* positions, const float* inv_freq,
                                          const RowStore& ring, int slots, float eps) {
    __shared__ float scratch[WARP + 1];
    __shared__ __align__(16) bf16 row[WIDEST_ROW];
    const int width = ring.width;
    const int rope_width = ring.rope_width;
    const int pairs = rope_width / 2;
    const int first_pair = threadIdx.x;
    const float frequency = first_pair < pairs ? inv_freq[first_pair] : 0.0f;
    pdl_launch();
    pdl_wait();
    const int64 position = positions[blockIdx.x];
    const bf16* in = kv + (int64)blockIdx.x * width;
    float squares = 0.0f;
    for (int d = threadIdx.x; d < width; d += blockDim.x) {
        row[d] = in[d];
        const float value = __bfloat162float(row[d]);
        squares += value * value;
    }
    const Turn first_turn = rope_turn(position, frequency);
    const float inverse = rsqrtf(block_sum(squares, scratch) / width + eps);
    for (int d = threadIdx.x; d < width; d += blockDim.x) {
        row[d] = __float2bfloat16(__bfloat162float(row[d]) * inverse * norm_weight[d]);
    }
    __syncthreads();
    bf16* rotary = row + width - rope_width;
    for (int pair = first_pair; pair < pairs; pair += blockDim.x) {
        const Turn turn = pair == first_pair ? first_turn : rope_turn(position, inv_freq[pair]);
        const float2 turned = rotate(__bfloat162float(rotary[2 * pair]),
                                     __bfloat162float(rotary[2 * pair + 1]), turn);
        rotary[2 * pair] = __float2bfloat16(turned.x);
        rotary[2 * pair + 1] = __float2bfloat16(turned.y);
    }
    __syncthreads();
    // Of position −1 too: a draft module has rows before the first one, which nobody reads.
    store_row(row, ring, position < 0 ? position + slots : position % slots);
}

extern "C" __global__ void __launch_bounds__(256)
    kv_write(const bf16* kv, const float* norm_weight, const int64* positions,
             const float* inv_freq, unsigned char* data, unsigned char* scale, int format,
             int width, int rope_width, int slots, float eps) {
    write_row(kv, norm_weight, positions, inv_freq,
              RowStore{data, scale, format, width, rope_width}, slots, eps);
}

// The same for rows that no other kernel takes; the name says so in a list of launches.
extern "C" __global__ void __launch_bounds__(256)
    kv_write_any_geometry(const bf16* kv, const float* norm_weight, const int64* positions,
                          const float* inv_freq, unsigned char* data, unsigned char* scale,
                          int format, int width, int rope_width, int slots, float eps) {
    write_row(kv, norm_weight, positions, inv_freq,
              RowStore{data, scale, format, width, rope_width}, slots, eps);
}
