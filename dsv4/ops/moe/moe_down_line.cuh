// The second phase of the experts' decode launch: in which order its products are computed and
// added up.
//
// A pair is two row tiles of the output. The K of its shared expert and then of all experts of the
// step, ascending, is one list of parts, PART_STAGES stages of an expert each. A warp adds up a
// part; y of a token is the sum of its experts' parts, one after the other. Parts of experts of
// other tokens are zeros for it, which change no bit. So y of a token does not go with what else is
// in the step, nor with who computes which part.
//
// The parts of all pairs form one line, and every block has an equal share of it, which it
// computes in rounds of one part per warp. After every few rounds, a batch, a warp for each token
// adds up the parts, while the others go on. Where a share ends within a pair, the sum so far goes
// to the next block, which goes on from there. So a block begins with the first parts of its last
// pair, for another block to go on with, and ends with the last parts of its first pair, whose sum
// has long come.
//
// Defines: those of moe_decode.cu.
#pragma once
#include "divisor.cuh"
#include "moe_sums.cuh"
#include "numbered_word.cuh"
#include "ptx.cuh"

constexpr int PART_STAGES = 2;
// Rounds of a batch, and batches whose parts may be in shared memory at a time.
constexpr int ROUNDS = TOKENS > 4 ? 2 : 4, BATCHES = 2;
static_assert(BATCHES <= BUFFERS, "every batch has barriers of its own");
// A sum that goes from block to block takes a trip through L2 each time.
constexpr int MOST_BLOCKS_OF_A_PAIR = 4;

// Blocks with a share of all parts: a round each at least, and all where there is enough to do.
__device__ __forceinline__ unsigned sharers(int pairs, int parts) {
    const int blocks = BLOCKS;
    // A pair that is cut costs an exchange between blocks: not for a few idle multiprocessors.
    if (pairs <= blocks && pairs * 20 >= blocks * 19) return pairs;
    return min(pairs * min(max(parts / WARPS, 1), MOST_BLOCKS_OF_A_PAIR), blocks);
}

// Parts of one pair that follow each other in a batch.
struct DownRun {
    int pair, parts;
    // They begin with the pair's first part or with a sum from another block, or follow the parts
    // before. Behind them the sum is complete, or goes to another block, or goes on.
    bool starts, receives, completes, sends;
};

// The share of a block, in the order in which it is computed: `head` parts of its last pair, which
// is not all there, then whole pairs, and from `tail` on the rest of the pair before those.
struct DownLine {
    int shared_stages, routed_stages, shared_parts, routed_parts;
    // Of a pair, and of the share.
    int parts, count;
    // `cut`: the place of the head on the line.
    int head, tail, cut;
    Divisor by_parts, by_routed_parts;

    __device__ __forceinline__ static int parts_of(int stages) {
        return (stages + PART_STAGES - 1) / PART_STAGES;
    }

    __device__ __forceinline__ DownLine(int pairs, int shared_n, int routed_n, int experts)
        : shared_stages(shared_n), routed_stages(routed_n), shared_parts(parts_of(shared_n)),
          routed_parts(parts_of(routed_n)), parts(shared_parts + experts * routed_parts),
          by_parts(parts), by_routed_parts(routed_parts) {
        const unsigned all = pairs * parts, blocks = sharers(pairs, parts);
        const unsigned share = min(blockIdx.x, blocks);
        const int begin = share * all / blocks, end = min(share + 1, blocks) * all / blocks;
        cut = max(by_parts.divide(end) * parts, begin);
        const int whole = min(by_parts.divide(begin + parts - 1) * parts, cut);
        count = end - begin, head = end - cut, tail = end - whole;
    }

    // On the line. Whole pairs end where the head begins, and begin where the tail ends.
    __device__ __forceinline__ int place(int index) const {
        int at = cut + index;
        if (index >= head) at -= tail;
        if (index >= tail) at -= count - head;
        return at;
    }

    // From `index` on, before `end`.
    __device__ __forceinline__ DownRun run(int index, int end) const {
        DownRun found;
        const int at = place(index);
        found.pair = by_parts.divide(at);
        const int within = at - found.pair * parts;
        found.parts = min(min(end, index < head ? head : count) - index, parts - within);
        found.starts = within == 0;
        found.receives = within > 0 && (index == 0 || index == tail);
        found.completes = within + found.parts == parts;
        found.sends = !found.completes && index + found.parts == head;
        return found;
    }
};

// A stage of a warp: slot of its expert (-1: the shared one), and which one of the expert's.
struct DownStage {
    int index, pair, slot, stage;

    __device__ __forceinline__ DownStage(const DownLine& line, int first) : index(first) {
        locate(line);
    }

    __device__ __forceinline__ bool active(const DownLine& line) const {
        return index < line.count;
    }

    // Whether it is the last one of a part.
    __device__ __forceinline__ bool ends(const DownLine& line) const {
        return (stage + 1) % PART_STAGES == 0 ||
               stage + 1 == (slot < 0 ? line.shared_stages : line.routed_stages);
    }

    __device__ __forceinline__ void advance(const DownLine& line) {
        if (!ends(line)) {
            ++stage;
            return;
        }
        index += WARPS;
        locate(line);
    }

    __device__ __forceinline__ void locate(const DownLine& line) {
        const int at = line.place(index);
        pair = line.by_parts.divide(at);
        int part = at - pair * line.parts;
        slot = -1;
        if (part >= line.shared_parts) {
            part -= line.shared_parts;
            slot = line.by_routed_parts.divide(part);
            part -= slot * line.routed_parts;
        }
        stage = part * PART_STAGES;
    }
};

// Sums on their way from a block to the next one: numbered words, like those of the scores.
struct SumExchange {
    NumberedWord* words;  // [blocks · T, WARP], zeros before the first launch
    unsigned launch;

    __device__ __forceinline__ void send(int row, int lane, float sum) const {
        store_word(words + row * WARP + lane, numbered(launch, sum));
    }

    __device__ __forceinline__ float receive(int row, int lane) const {
        const Deadline deadline;
        NumberedWord word;
        while (true) {
            word = load_word(words + row * WARP + lane);
            if (__all_sync(~0u, unsigned(word >> 32) == launch)) break;
            deadline.check();
        }
        return __uint_as_float(unsigned(word));
    }
};
