// Bytes that came in one piece, each part of them put where it belongs
// (dsv4/ops/scatter/__init__.py).
#include "common.cuh"

// `bytes` of each of `rows` rows of `width`, from memory + source on; at the target they follow one
// another. As table_words of cuda.py.
struct Part {
    int64 source;
    char* target;
    int64 bytes, rows, width;
};

constexpr int BATCH = 64;

template <typename Word>
__device__ __forceinline__ void put(const char* memory, const Part& part) {
    const char* source = memory + part.source;
    Word* target = reinterpret_cast<Word*>(part.target);
    // A piece of memory has less than 2^32 bytes.
    const unsigned words = part.bytes / sizeof(Word), all = part.rows * words;
    const unsigned threads = gridDim.x * blockDim.x;
#pragma unroll 4
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += threads) {
        const unsigned row = i / words;
        const char* of_row = source + row * part.width;
        target[i] = __ldcs(reinterpret_cast<const Word*>(of_row) + (i - row * words));
    }
}

// `table`: of `parts` parts, in words, somewhere in `memory`.
extern "C" __global__ void scatter(const char* memory, const int64* table, int parts) {
    pdl_launch();
    pdl_wait();
    constexpr int WORDS = sizeof(Part) / sizeof(int64);
    __shared__ Part batch[BATCH];
    for (int first = 0; first < parts; first += BATCH) {
        const int count = min(BATCH, parts - first);
        __syncthreads();
        for (int i = threadIdx.x; i < count * WORDS; i += blockDim.x)
            reinterpret_cast<int64*>(batch)[i] = table[first * WORDS + i];
        __syncthreads();
        for (int i = 0; i < count; ++i) {
            const Part part = batch[i];
            const int64 address = reinterpret_cast<int64>(memory) + part.source;
            const int64 bits = address | reinterpret_cast<int64>(part.target) | part.bytes |
                               (part.rows > 1 ? part.width : 0);
            if (bits % 16 == 0) put<int4>(memory, part);
            else if (bits % 8 == 0) put<int64>(memory, part);
            else if (bits % 4 == 0) put<int>(memory, part);
            else put<char>(memory, part);
        }
    }
}
