// The end of a step with drafts (dsv4/ops/acceptance/__init__.py): which of its tokens stay, for
// the next step and for the host.
#include "common.cuh"

constexpr int64 NO_TOKEN = -1;
constexpr int64 KEPT = -2;

// Drafts for the step that verifies them: a sampler's NO_TOKEN becomes a token that exists.
extern "C" __global__ void enter_drafts(const int64* drafts, int64* tokens, int count) {
    pdl_launch();
    pdl_wait();
    if (threadIdx.x < count) {
        const int64 draft = drafts[threadIdx.x];
        tokens[threadIdx.x] = draft < 0 ? 0 : draft;
    }
}

// One warp. `ring` has three rows of `slots`: tokens by their positions, and by the position of a
// step how many it gave and how many drafts it had.
extern "C" __global__ void settle_block(const int64* replacements, const int64* drafts, int count,
                                        const int64* behind, const int64* position,
                                        int64* rejected, int64* tokens, int64* ring, int slots,
                                        const int* nan) {
    pdl_wait();
    const int lane = threadIdx.x;
    int64 token = NO_TOKEN;
    int64 draft = 0;
    if (lane < count) token = replacements[lane], draft = drafts[lane];
    if (lane == count) token = *behind;
    // Host memory, which kernels of other devices may have written.
    int met_nan;
    asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(met_nan) : "l"(nan));
    const bool bad = __ballot_sync(~0u, lane <= count && token == NO_TOKEN) != 0 || met_nan;
    const unsigned ended = __ballot_sync(~0u, lane < count && draft < 0);
    const unsigned chosen = __ballot_sync(~0u, lane <= count && token != KEPT);
    const int accepted = __ffs(chosen) - 1;
    const int made = ended ? __ffs(ended) - 1 : count;
    int64 next = __shfl_sync(~0u, token, accepted & 31);
    const int64 start = *position - count - 1;
    int given = accepted + 1;
    if (bad) {
        // With drafts the host runs the token before them again by itself.
        given = count > 0 ? 0 : 1;
        next = NO_TOKEN;
    }
    if (lane < given) ring[(start + 1 + lane) % slots] = lane == given - 1 ? next : draft;
    if (lane > 0) return;
    ring[slots + start % slots] = given;
    ring[2 * slots + start % slots] = made;
    *rejected = count + 1 - given;
    if (given > 0) *tokens = next < 0 ? 0 : next;
}
