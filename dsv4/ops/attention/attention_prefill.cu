// Attention of many tokens over the window ring and compressed entries, by mma.sync, and the pass
// before it that dequantizes fp8 rows to bf16. dsv4.ops.attention.sparse_attention is the meaning.
#include "attention_prefill.cuh"
#include "mma.cuh"

constexpr int THREADS = 256;
constexpr int K_STEPS = DIM / 16;

// Byte offsets in shared memory; the launcher knows the sum, and adds 1 KiB for the alignment.
constexpr int QUERIES = 0;
constexpr int TILES = QUERIES + TILE_BYTES;
constexpr int EXCHANGE = TILES + 2 * TILE_BYTES;  // partial logits, then the weights of the tile
constexpr int PEAKS = EXCHANGE + 16384;           // float [2][64]: row maxima of the two key halves
constexpr int SHRINK = PEAKS + 512;  // float [64]: factor of the old sums, then 1 / denominator
constexpr int SUMS = SHRINK + 256;   // float [2][64]
constexpr int TURNS = SUMS + 512;    // Turn [32]
constexpr int MASKS = TURNS + 256;   // TileMask [2]
#ifdef SHARED_BYTES
static_assert(MASKS + 2 * sizeof(TileMask) + 1024 <= SHARED_BYTES, "the launcher allocates less");
#endif

__device__ __forceinline__ void load_matrices(unsigned (&fragment)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&fragment)[4],
                                                         unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
}

// Logits of 32 heads and 32 keys over half of the columns (`half`).
__device__ __forceinline__ void partial_logits(float (&s)[2][4][4], unsigned queries, unsigned keys,
                                               int first_head, int first_key, int half, int lane) {
    const int a_row = first_head + (lane & 15), a_chunk = lane >> 4;
    const int b_row = first_key + (lane & 7) + ((lane >> 4) << 3);
    const int b_chunk = (lane >> 3) & 1;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
#pragma unroll 4
    for (int step = half * (K_STEPS / 2); step < (half + 1) * (K_STEPS / 2); step++) {
        const unsigned block = step / 4 * BLOCK_BYTES;
        const int chunk = step % 4 * 2;
        unsigned a[2][4], b[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
            load_matrices(a[m], queries + block + swizzled(a_row + m * 16, chunk + a_chunk));
#pragma unroll
        for (int n = 0; n < 2; n++)
            load_matrices(b[n], keys + block + swizzled(b_row + n * 16, chunk + b_chunk));
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                mma_bf16(s[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
}

// sums += weights [64 heads, 64 keys] times one column block of the tile.
__device__ __forceinline__ void add_values(float (&o)[4][8][4], unsigned weights, unsigned block,
                                           int lane) {
    const int row = lane & 15, chunk = lane >> 4;
#pragma unroll
    for (int step = 0; step < TILE / 16; step++) {
        unsigned b[4][4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            load_matrices_transposed(b[n], block + swizzled(step * 16 + row, n * 2 + chunk));
#pragma unroll
        for (int m = 0; m < 4; m++) {
            unsigned a[4];
            load_matrices(a, weights + swizzled(m * 16 + row, step * 2 + chunk));
#pragma unroll
            for (int n = 0; n < 8; n++)
                mma_bf16(o[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }
}

// Running softmax of 2 x 8 logits of a thread: rows `row` and `row + 8`, columns 8n + 2 (lane % 4)
// + {0, 1}.
struct RowState {
    float peak[2], sum[2];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_prefill(const bf16* q, const bf16* ring, const bf16* compressed,
                      const int64* selected, const float* sink, const int64* positions,
                      const float* inv_freq, bf16* out, int tokens, int heads, int ring_slots,
                      int compressed_slots, int listed, int ratio, int window,
                      float softmax_scale) {
    extern __shared__ unsigned char shared_raw[];
    unsigned char* shared = shared_raw + (-shared_address(shared_raw) & 1023);
    const unsigned base = shared_address(shared);
    float* peaks = reinterpret_cast<float*>(shared + PEAKS);
    float* shrink = reinterpret_cast<float*>(shared + SHRINK);
    float* sums = reinterpret_cast<float*>(shared + SUMS);
    Turn* turns = reinterpret_cast<Turn*>(shared + TURNS);
    const int thread = threadIdx.x;
    const int warp = thread / WARP;
    const int lane = thread % WARP;
    const Keys keys{
        ring, compressed, selected, ring_slots, compressed_slots, listed, ratio, window,
    };

    pdl_wait();
    pdl_launch();
    // Late tokens see most keys: they go first, so that the last blocks to run are short.
    const int groups = (heads + HEADS - 1) / HEADS;
    const int token = tokens - 1 - blockIdx.x / groups;
    const int head0 = blockIdx.x % groups * HEADS;
    // q_HD = q_THD[token, head0 : head0 + HEADS]
    // keys_KD = torch.cat([window_rows, entries[indices]])
    const int head_count = min(heads - head0, HEADS);
    const int64 position = positions[token];
    const Seen seen = seen_by(keys, token, position);
    unsigned char* masks = shared + MASKS;

    load_queries<THREADS, COLUMN_BLOCKS>(base + QUERIES, q + ((int64)token * heads + head0) * DIM,
                                         head_count, 0, thread);
    TileRows<THREADS> rows;
    auto gather = [&](int tile) {
        rows.find(seen, tile * TILE, thread);
        rows.gather<COLUMN_BLOCKS>(base + TILES + (tile & 1) * TILE_BYTES, masks + (tile & 1) * 16,
                                   keys, seen, tile * TILE, 0, thread);
        cp_async_commit();
        return rows.any(seen, tile * TILE, thread);
    };
    gather(0);
    bool any = gather(1);
    output_turns(turns, inv_freq, position, thread);

    // Logits: 32 heads x 32 keys x half of the columns per warp; warps w and w ^ 4 hold the two
    // halves of one tile and finish 16 heads each.
    const int head_half = warp & 1;
    const int key_half = warp >> 1 & 1;
    const int column_half = warp >> 2;
    const int row = head_half * 32 + column_half * 16 + lane / 4;
    float* mailbox = reinterpret_cast<float*>(shared + EXCHANGE) + warp * 512 + lane;
    const float* partner = reinterpret_cast<float*>(shared + EXCHANGE) + (warp ^ 4) * 512 + lane;
    const float to_log2 = softmax_scale * LOG2_E;
    RowState state{{NO_LOGIT, NO_LOGIT}, {0.0f, 0.0f}};
    float o[4][8][4];
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[m][n][i] = 0.0f;

    const int tiles = (seen.keys + TILE - 1) / TILE;
    for (int tile = 0; tile < tiles; tile++) {
        const unsigned current = base + TILES + (tile & 1) * TILE_BYTES;
        if (tile == 0) cp_async_wait<1>();
        else cp_async_wait<0>();
        // This tile is there and everyone is done with the one before; a tile of -1s changes
        // nothing.
        const bool empty = !__syncthreads_or(tile == 0 || any);
        if (tile > 0 && tile + 1 < tiles) any = gather(tile + 1);
        if (empty) continue;

        float s[2][4][4];
        // logits_HK = q_HD @ keys_KD.T: the two halves of the columns meet in the mailboxes
        partial_logits(s, base + QUERIES, current, head_half * 32, key_half * 32, column_half,
                       lane);
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                mailbox[(n * 4 + i) * WARP] = column_half ? s[0][n][i] : s[1][n][i];
        __syncthreads();
        float logit[4][4];
        float peak[2] = {NO_LOGIT, NO_LOGIT};
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                logit[n][i] = (column_half ? s[1][n][i] : s[0][n][i]) + partner[(n * 4 + i) * WARP];
        // logits_HK[:, ~visible_K] = -inf
        TileMask mask(masks + (tile & 1) * 16);
        if (!mask.full()) {
            if (key_half) mask.words[0] = mask.words[2], mask.words[1] = mask.words[3];
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (!mask.has(n, i % 2, lane)) logit[n][i] = NO_LOGIT;
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) peak[i / 2] = fmaxf(peak[i / 2], logit[n][i]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            peak[i] = quad_max(peak[i]) * to_log2;
            if (lane % 4 == 0) peaks[key_half * 64 + row + i * 8] = peak[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // peak_H = max(peak_H, logits_HK.amax(-1)); sum_H *= exp(old_peak_H - peak_H)
            const float raised = raised_peak(
                state.peak[i], fmaxf(peak[i], peaks[(key_half ^ 1) * 64 + row + i * 8]));
            const float factor = raised == state.peak[i] ? 1.0f : exp2_fast(state.peak[i] - raised);
            state.peak[i] = raised;
            state.sum[i] *= factor;
            if (key_half == 0 && lane % 4 == 0) shrink[row + i * 8] = factor;
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                // p_HK = exp(logits_HK - peak_H); sum_H += p_HK.sum(-1)
                const float left = exp2_fast(fmaf(logit[n][2 * i], to_log2, -state.peak[i]));
                const float right = exp2_fast(fmaf(logit[n][2 * i + 1], to_log2, -state.peak[i]));
                state.sum[i] += left + right;
                store_shared(
                    base + EXCHANGE + swizzled(row + i * 8, key_half * 4 + n) + lane % 4 * 4,
                    packed_bits(left, right));
            }
        __syncthreads();
        // out_HD = out_HD * exp(old_peak_H - peak_H) + p_HK @ keys_KD
        if (warp < COLUMN_BLOCKS) {
            float factor[4][2];
            bool changed = false;
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    factor[m][i] = shrink[m * 16 + i * 8 + lane / 4];
                    changed |= factor[m][i] != 1.0f;
                }
            if (__any_sync(~0u, changed)) {
#pragma unroll
                for (int m = 0; m < 4; m++)
#pragma unroll
                    for (int n = 0; n < 8; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) o[m][n][i] *= factor[m][i / 2];
            }
            add_values(o, base + EXCHANGE, current + warp * BLOCK_BYTES, lane);
        }
    }

    cp_async_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        // denominator_H = sum_H + exp(sink_H - peak_H)
        state.sum[i] = quad_sum(state.sum[i]);
        if (lane % 4 == 0) {
            sums[key_half * 64 + row + i * 8] = state.sum[i];
            if (key_half == 0) peaks[row + i * 8] = state.peak[i];
        }
    }
    __syncthreads();
    if (thread < HEADS) {
        const float sink_log2 = thread < head_count ? sink[head0 + thread] * LOG2_E : 0.0f;
        shrink[thread] =
            1.0f / (sums[thread] + sums[64 + thread] + exp2_fast(sink_log2 - peaks[thread]));
    }
    __syncthreads();
    if (warp >= COLUMN_BLOCKS) return;
    // Through shared memory (the tiles are no longer needed), so that whole lines are written.
    // out_HD = rope(out_HD / denominator_H, position, inverse=True)
    const unsigned block = base + TILES + warp * BLOCK_BYTES;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int head = m * 16 + i * 8 + lane / 4;
            const float factor = shrink[head];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const int column = n * 8 + lane % 4 * 2;
                const float a = o[m][n][2 * i] * factor;
                const float b = o[m][n][2 * i + 1] * factor;
                store_shared(
                    block + swizzled(head, n) + lane % 4 * 4,
                    warp == COLUMN_BLOCKS - 1 ? rotated(a, b, column, turns) : packed_bits(a, b));
            }
        }
    __syncwarp();
    bf16* target = out + ((int64)token * heads + head0) * DIM + warp * 64 + lane % 8 * 8;
#pragma unroll
    for (int pass = 0; pass < HEADS / 4; pass++) {
        const int head = pass * 4 + lane / 8;
        const uint4 value = load_shared16(block + swizzled(head, lane % 8));
        if (head < head_count) *reinterpret_cast<uint4*>(target + head * DIM) = value;
    }
}

// KV_FP8 rows to bf16 (exact: three mantissa bits times a power of two), one warp per row at a
// time: the window rows of these tokens, to their own slots, and every compressed entry that is
// complete for the last of them. Codes are read 16 at a time; the launcher has other fp8 rows
// attended as they are stored, and bf16 rows are never dequantized.
#if (DIM - ROPE) % 16 == 0
extern "C" __global__ void attention_prefill_dequantize(
    const unsigned char* ring, const unsigned char* ring_scale, const unsigned char* compressed,
    const unsigned char* compressed_scale, const int64* positions, bf16* ring_out,
    bf16* compressed_out, int tokens, int ring_slots, int compressed_slots, int ratio, int window) {
    constexpr int QUANTIZED = DIM - ROPE, ROW_BYTES = QUANTIZED + 2 * ROPE;
    constexpr int SCALE_BYTES = ((QUANTIZED + 63) / 64 + 7) / 8 * 8;
    static_assert(ROPE % 8 == 0, "rows are read 16 bytes at a time");
    const int lane = threadIdx.x % WARP;
    const int warps = gridDim.x * (blockDim.x / WARP);
    pdl_wait();
    pdl_launch();
    const int64 last = positions[tokens - 1];
    const int window_rows = (int)min((int64)tokens + window - 1, last + 1);
    const int entries = compressed ? (int)min((last + 1) / ratio, (int64)compressed_slots) : 0;
    for (int index = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
         index < window_rows + entries; index += warps) {
        const bool windowed = index < window_rows;
        const int64 slot = windowed ? (last - index) % ring_slots : index - window_rows;
        const unsigned char* row = (windowed ? ring : compressed) + slot * ROW_BYTES;
        const unsigned char* scale =
            (windowed ? ring_scale : compressed_scale) + slot * SCALE_BYTES;
        bf16* target = (windowed ? ring_out : compressed_out) + slot * DIM;
        for (int piece = lane; piece < QUANTIZED / 16; piece += WARP) {
            const uint4 codes = *reinterpret_cast<const uint4*>(row + piece * 16);
            const float factor = e8m0_to_float(scale[piece / 4]);
            const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
            unsigned dequantized[8];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint2 halves = e4m3x4_to_f16x4(words[i]);
                const float2 first = f16x2_to_floats(halves.x), second = f16x2_to_floats(halves.y);
                dequantized[2 * i] = packed_bits(first.x * factor, first.y * factor);
                dequantized[2 * i + 1] = packed_bits(second.x * factor, second.y * factor);
            }
            // row = (codes.float() * scale).bfloat16()
            uint4* store = reinterpret_cast<uint4*>(target + piece * 16);
            store[0] = make_uint4(dequantized[0], dequantized[1], dequantized[2], dequantized[3]);
            store[1] = make_uint4(dequantized[4], dequantized[5], dequantized[6], dequantized[7]);
        }
        // The rotary values are bf16 already; the lanes that have no codes in the real geometry
        // copy them.
        for (int piece = WARP - 1 - lane; piece < ROPE / 8; piece += WARP)
            *reinterpret_cast<uint4*>(target + QUANTIZED + piece * 8) =
                *reinterpret_cast<const uint4*>(row + QUANTIZED + piece * 16);
    }
}
#endif
