// Prefill attention, bf16: many query tokens per sequence, causal, with keys and values through the block table. A
// chunk, a prefix hit and a whole prompt therefore take the same path.
//
// Grid (tiles, query heads). A tile is up to 64 queries of one sequence, 16 per warp. Keys come in tiles of 64, with
// wide heads of 32, and the next tile is loaded during the computation of one. Scores are in units of log 2.

#define SIDE_BYTES (KEYS * ROW_BYTES)

// tiles[i] = {row of the first query, queries, position of the first, start of the block table}.
extern "C" __global__ void __launch_bounds__(128)
prefill_attention(const T* qkv, const T* pool, const int* tables, const int* tiles, T* out, u64 block_stride, u64 layer,
                  u32 heads, u32 kv_heads, u32 block_tokens, float scale WINDOW_PARAMETER CAP_PARAMETER) {
    let_later_begin();
    wait_for_earlier();
    extern __shared__ __align__(16) unsigned char shared[];
    const int* tile = tiles + blockIdx.x * 4;
    const int queries = tile[1], first = tile[2];
    const int* table = tables + tile[3];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = blockIdx.y, kv_head = head / (heads / kv_heads), end = first + queries;
    const u64 width = static_cast<u64>(heads + 2 * kv_heads) * HEAD_DIM;
    const u32 base = shared_address(shared);

    // A tile of keys is the work of all warps, or of the first two.
    auto request = [&](int from) {
        if (from < end && (KEYS == 64 || warp * 16 < KEYS)) {
            const u32 at = base + from / KEYS % 2 * 2 * SIDE_BYTES + warp * 16 * ROW_BYTES;
            request_16(at, at + SIDE_BYTES, pool, table, block_stride, layer, kv_head, kv_heads, block_tokens,
                       from + warp * 16, end);
        }
        copies_end_group();
    };
    const int begin = OLDEST(first) / KEYS * KEYS;
    request(begin);

    u32 q[STEPS][4];
    const int mine = warp * 16;
    load_queries(q, qkv + (static_cast<u64>(tile[0]) + mine) * width + static_cast<u64>(head) * HEAD_DIM, width,
                 queries - mine);
    float outputs[HEAD_DIM / 8][4] = {}, highest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, sum[2] = {0.0f, 0.0f};
    const float factor = SCORE_FACTOR;
    // The last position of this warp's queries.
    const int last = first + min(queries, mine + 16) - 1;

    for (int from = begin; from < end; from += KEYS) {
        request(from + KEYS);
        copies_wait<1>();
        __syncthreads();
        const u32 at = base + from / KEYS % 2 * 2 * SIDE_BYTES;
        if (mine < queries && from <= last && !IS_BEFORE_WINDOW(from + KEYS - 1, first + mine)) {
            float scores[KEYS / 16][2][4];
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) score_16(scores[n], q, at + n * 16 * ROW_BYTES);
            const bool masked = from + KEYS > first + mine + 1 || IS_BEFORE_WINDOW(from, first + mine + 15);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int position = first + mine + lane / 4 + half * 8;
                float best = highest[half];
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float& score = scores[n / 2][n % 2][half * 2 + i];
                        score = SCORE(score);
                        if (masked && IS_HIDDEN(from + n * 8 + lane % 4 * 2 + i, position)) score = NEGATIVE_INFINITY;
                        best = fmaxf(best, score);
                    }
                }
                best = quad_max(best);
#if WINDOWS
                // The window of a query may begin after this tile.
                const float pivot = best == NEGATIVE_INFINITY ? 0.0f : best;
#else
                // Every query sees key 0, which is in the first tile, so this is a number from there on.
                const float pivot = best;
#endif
                const float shrink = power_of_2(highest[half] - pivot);
                highest[half] = best;
                sum[half] *= shrink;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float& score = scores[n / 2][n % 2][half * 2 + i];
                        score = power_of_2(score - pivot);
                        sum[half] += score;
                    }
                }
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; n++) {
                    outputs[n][half * 2] *= shrink;
                    outputs[n][half * 2 + 1] *= shrink;
                }
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) gather_16(outputs, scores[n], at + SIDE_BYTES + n * 16 * ROW_BYTES);
        }
        // The next request overwrites data that every warp must have read.
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = mine + lane / 4 + half * 8;
        const float inverse = 1.0f / quad_sum(sum[half]);
        if (row >= queries) continue;
        T* to = out + ((static_cast<u64>(tile[0]) + row) * heads + head) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
            *reinterpret_cast<u32*>(to + n * 8) =
                narrow_2(outputs[n][half * 2] * inverse, outputs[n][half * 2 + 1] * inverse);
        }
    }
}
