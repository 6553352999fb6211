// Compressor (dsv4/ops/compressor/__init__.py) as an op of its own: see compressor.cuh. FORMAT is
// that of rows of WIDTH. EARLY: see compress_window.
#include "compressor.cuh"

#ifndef RATIO
#define RATIO 4
#endif
#ifndef GROUPS
#define GROUPS 1
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef EARLY
#define EARLY 1
#endif
#ifndef WIDTH
#define WIDTH 512
#define ROPE 64
#define FORMAT ROW_KV_FP8
#endif

constexpr int THREADS = 512;
#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == 4 * window_floats<GROUPS>(WIDTH / BLOCKS, THREADS),
              "the launcher allocates something else");
#endif

// Block (x, y): share x of the y-th window that the step may complete; with `store` also of the
// ring's y-th new token.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    compress(const float* kv, const float* score, const settled_int64* positions, const float* ape,
             const float* norm, const float* inv_freq, float* ring_kv, float* ring_score,
             unsigned char* data, unsigned char* block_scale, int count, int kv_stride,
             int score_stride, int slots, int row_slots, int store, int hadamard_keys, int round,
             float eps, float normaliser) {
    extern __shared__ __align__(16) float row[];
    const Compression step{kv,           score,
                           ape,          norm,
                           inv_freq,     ring_kv,
                           ring_score,   {data, block_scale, FORMAT, WIDTH, ROPE},
                           row_slots,    slots,
                           count,        kv_stride,
                           score_stride, hadamard_keys != 0,
                           round != 0,   eps,
                           normaliser};
    compress_window<RATIO, GROUPS, BLOCKS, EARLY>(step, positions, blockIdx.x, blockIdx.y,
                                                  store != 0, row);
}

// Stores the last gridDim.x of `count` tokens in the ring, one per block.
extern "C" __global__ void __launch_bounds__(256)
    compress_ring(const float* kv, const float* score, const int64* positions, const float* ape,
                  float* ring_kv, float* ring_score, int count, int kv_stride, int score_stride,
                  int slots) {
    constexpr int COLUMNS = RATIO == 4 ? 2 * WIDTH : WIDTH;
    pdl_launch();
    pdl_wait();
    Compression step{};
    step.kv = kv, step.score = score, step.ape = ape, step.ring_kv = ring_kv,
    step.ring_score = ring_score;
    step.ring_slots = slots, step.kv_stride = kv_stride, step.score_stride = score_stride;
    store_in_ring<RATIO>(step, (int)positions[0], count - gridDim.x + blockIdx.x, 0, COLUMNS,
                         COLUMNS);
}
