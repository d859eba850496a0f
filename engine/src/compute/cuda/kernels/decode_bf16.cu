// Decode attention, bf16: one query token per sequence, with its keys divided into splits.
//
// Grid (splits, KV heads x groups of 16 query heads, sequences). A block has all query heads of one KV head, so that
// keys and values are read once. Its four warps are independent of each other. Each has its own pipeline over every
// fourth tile of 16 tokens and its own online softmax. The block combines them at the end. Scores are in units of log
// 2.

#define TILE_BYTES (16 * ROW_BYTES)

// decode[i] = {row of the query, number of keys, start of its block table}; no keys: the entry is padding.
// partial[i][head][split][HEAD_DIM] are numerators; summary[i][head][split] = {maximum, denominator}.
extern "C" __global__ void __launch_bounds__(128)
decode_attention(const T* qkv, const T* pool, const int* tables, const int* decode, float* partial, float* summary,
                 u64 block_stride, u64 layer, u32 heads, u32 kv_heads, u32 block_tokens, u32 splits, float scale
                 WINDOW_PARAMETER CAP_PARAMETER) {
    extern __shared__ __align__(16) unsigned char shared[];
    let_later_begin();
    // The step's integers, and all keys and values except the newest, existed before the first kernel of the step. The
    // first copies of them therefore start while earlier kernels still run.
    const int* entry = decode + blockIdx.z * 3;
    const int length = entry[1];
    if (length == 0) {
        wait_for_earlier();
        return;
    }
    const int* table = tables + entry[2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = heads / kv_heads, group_tiles = (group + 15) / 16;
    const int kv_head = blockIdx.y / group_tiles, first_in_group = blockIdx.y % group_tiles * 16;
    const int count = min(16, group - first_in_group), first_head = kv_head * group + first_in_group;
    const u64 results = (static_cast<u64>(blockIdx.z) * heads + first_head) * splits + blockIdx.x;

    const int oldest = OLDEST(length - 1), per_split = split_tokens(length - oldest, splits);
    const int start = oldest + blockIdx.x * per_split, end = min(length, start + per_split);
    if (start >= end) {
        wait_for_earlier();
        if (threadIdx.x < count) {
            summary[(results + static_cast<u64>(threadIdx.x) * splits) * 2] = NEGATIVE_INFINITY;
            summary[(results + static_cast<u64>(threadIdx.x) * splits) * 2 + 1] = 0.0f;
        }
        return;
    }
    const u32 keys = shared_address(shared) + warp * DECODE_STAGES * 2 * TILE_BYTES;
    const int tiles = (end - start + 15) / 16;
    auto request = [&](int tile) {
        if (tile < tiles) {
            const u32 at = keys + tile / DECODE_WARPS % DECODE_STAGES * 2 * TILE_BYTES;
            request_16(at, at + TILE_BYTES, pool, table, block_stride, layer, kv_head, kv_heads, block_tokens,
                       start + tile * 16, end);
        }
        copies_end_group();
    };
    auto is_old = [&](int tile) { return start + tile * 16 + 16 < length; };
#pragma unroll
    for (int stage = 0; stage < DECODE_STAGES - 1; stage++) {
        if (is_old(warp + stage * DECODE_WARPS)) request(warp + stage * DECODE_WARPS);
    }
    wait_for_earlier();
#pragma unroll
    for (int stage = 0; stage < DECODE_STAGES - 1; stage++) {
        if (!is_old(warp + stage * DECODE_WARPS)) request(warp + stage * DECODE_WARPS);
    }

    const u64 width = static_cast<u64>(heads + 2 * kv_heads) * HEAD_DIM;
    u32 q[STEPS][4];
    load_queries(q, qkv + entry[0] * width + static_cast<u64>(first_head) * HEAD_DIM, HEAD_DIM, count);
    float outputs[HEAD_DIM / 8][4] = {}, highest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, sum[2] = {0.0f, 0.0f};
    const float factor = SCORE_FACTOR;

    for (int tile = warp; tile < tiles; tile += DECODE_WARPS) {
        request(tile + (DECODE_STAGES - 1) * DECODE_WARPS);
        copies_wait<DECODE_STAGES - 1>();
        __syncwarp();
        const u32 at = keys + tile / DECODE_WARPS % DECODE_STAGES * 2 * TILE_BYTES;
        float scores[2][4];
        score_16(scores, q, at);
        const int token = start + tile * 16 + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float best = highest[half];
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& score = scores[n][half * 2 + i];
                    score = token + n * 8 + i < end ? SCORE(score) : NEGATIVE_INFINITY;
                    best = fmaxf(best, score);
                }
            }
            // The tile has at least one token, so this is a number.
            best = quad_max(best);
            const float shrink = power_of_2(highest[half] - best);
            highest[half] = best;
            sum[half] *= shrink;
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& score = scores[n][half * 2 + i];
                    score = power_of_2(score - best);
                    sum[half] += score;
                }
            }
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                outputs[n][half * 2] *= shrink;
                outputs[n][half * 2 + 1] *= shrink;
            }
        }
        gather_16(outputs, scores, at + TILE_BYTES);
        // The next request overwrites a stage that every lane must have read.
        __syncwarp();
    }
    copies_wait<0>();
    __syncthreads();

    // Combines the warps: numerators, then maximum and denominator of each row, by warp. Rows are eight words longer
    // than a head, so that the four rows that a warp writes at once are in different banks.
    constexpr int MEETING = HEAD_DIM + 8;
    float* meeting = reinterpret_cast<float*>(shared);
    float* numbers = meeting + DECODE_WARPS * 16 * MEETING;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp * 16 + lane / 4 + half * 8;
        const float total = quad_sum(sum[half]);
        if (lane / 4 + half * 8 >= count) continue;
        if (lane % 4 == 0) {
            numbers[row * 2] = highest[half];
            numbers[row * 2 + 1] = total;
        }
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
            meeting[row * MEETING + n * 8 + lane % 4 * 2] = outputs[n][half * 2];
            meeting[row * MEETING + n * 8 + lane % 4 * 2 + 1] = outputs[n][half * 2 + 1];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * HEAD_DIM; i += blockDim.x) {
        const int row = i / HEAD_DIM, column = i % HEAD_DIM;
        float best = NEGATIVE_INFINITY;
#pragma unroll
        for (int w = 0; w < DECODE_WARPS; w++) best = fmaxf(best, numbers[(w * 16 + row) * 2]);
        float value = 0.0f, total = 0.0f;
#pragma unroll
        for (int w = 0; w < DECODE_WARPS; w++) {
            const float weight = power_of_2(numbers[(w * 16 + row) * 2] - best);
            value += weight * meeting[(w * 16 + row) * MEETING + column];
            total += weight * numbers[(w * 16 + row) * 2 + 1];
        }
        const u64 at = results + static_cast<u64>(row) * splits;
        partial[at * HEAD_DIM + column] = value;
        if (column == 0) {
            summary[at * 2] = best;
            summary[at * 2 + 1] = total;
        }
    }
}
