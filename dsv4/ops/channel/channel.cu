// Rows on their way from one device to another as words {tag, 32 bits}, without the host. The
// sender writes them into memory of the receiver, which waits for each of them by itself: a word
// says which use of the channel it belongs to, so there is no fence, no flag and no reset. Both
// ends count the uses, each for itself (launch_number.cuh).
//
// Defines: EARLY (1: the next kernel may start while what is in front of this one still runs),
// HALVES (a word has 16 bits of the rows, which are no whole values of 32 bits).
#include "launch_number.cuh"
#include "words.cuh"

// Of values of any type.
#ifdef HALVES
using bits = unsigned short;
#else
using bits = unsigned;
#endif
using count64 = unsigned long long;

// One end of a channel in this use of it.
struct End {
    LaunchNumber uses;
    unsigned tag;

    // After pdl_wait.
    __device__ __forceinline__ explicit End(count64* counter)
        : uses{counter}, tag(uses.read()) {}

    // All threads of every block, once.
    __device__ __forceinline__ void close() const {
        __syncthreads();
        if (threadIdx.x == 0) uses.end();
    }
};

// Where it is told which words did not come: {1, sender, receiver, use}.
struct Fault {
    int* words;
    int sender, receiver;
};

// The value of a word when it has come.
__device__ __forceinline__ unsigned wait_for(const word64* word, unsigned tag,
                                             const Fault& fault) {
    word64 found = load_word(word);
    if (tag_of(found) == tag) return unsigned(found);
    const long long end = clock64() + WAIT_CYCLES;
    while (tag_of(found) != tag) {
        if (clock64() > end) give_up_waiting(fault.words, fault.sender, fault.receiver, int(tag));
        found = load_word(word);
    }
    return unsigned(found);
}

// words = rows, `count` values.
extern "C" __global__ void send_rows(const bits* rows, word64* words, count64* uses, int count) {
    pdl_launch();
    pdl_wait();
    const End end(uses);
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) store_word(int64(words + at), make_word(end.tag, rows[at]));
    end.close();
}

// rows = words: value i goes to column i % width of row i / width, which are `pitch` apart.
extern "C" __global__ void receive_rows(const word64* words, count64* uses, int* fault, int sender,
                                        int receiver, bits* rows, int count, int width,
                                        int pitch) {
    if (EARLY) pdl_launch();
    pdl_wait();
    if (!EARLY) pdl_launch();
    const End end(uses);
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count)
        rows[(int64)(at / width) * pitch + at % width] =
            bits(wait_for(words + at, end.tag, {fault, sender, receiver}));
    end.close();
}

// tokens = words, two for each, unless the host has given them: then `given` is not 0, and becomes
// it. A sampler's NO_TOKEN becomes a token that exists. One block.
extern "C" __global__ void take_tokens(const word64* words, count64* uses, int* fault, int sender,
                                       int receiver, int64* given, int64* tokens, int count) {
    pdl_wait();
    pdl_launch();
    const bool is_given = *given != 0;
    __syncthreads();  // all have read it
    if (is_given) {
        if (threadIdx.x == 0) *given = 0;
        return;
    }
    const End end(uses);
    const Fault missing{fault, sender, receiver};
    for (int at = threadIdx.x; at < count; at += blockDim.x) {
        const int64 low = wait_for(words + 2 * at, end.tag, missing);
        const int64 high = wait_for(words + 2 * at + 1, end.tag, missing);
        tokens[at] = max(high << 32 | low, int64(0));
    }
    end.close();
}
