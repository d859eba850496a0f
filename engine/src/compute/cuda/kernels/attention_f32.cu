// Attention in f32, for checks of exactness: plain, with one warp per query head and query. Arguments and results are
// those of the bf16 kernels.

#define ELEMENTS ((HEAD_DIM + 31) / 32)

// Keys from `start` to `end` for one query: numerators in `outputs`, maximum (in units of log 2) and denominator.
__device__ __forceinline__ void attend(const T* query, const T* pool, const int* table, u64 block_stride, u64 layer,
                                       int head, int kv_heads, int block_tokens, int start, int end,
                                       float scale CAP_PARAMETER,
                                       float (&outputs)[ELEMENTS], float& highest, float& sum) {
    const int lane = threadIdx.x % 32;
    const float factor = SCORE_FACTOR;
    float q[ELEMENTS];
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) {
        q[e] = e * 32 + lane < HEAD_DIM ? query[e * 32 + lane] : 0.0f;
        outputs[e] = 0.0f;
    }
    highest = NEGATIVE_INFINITY;
    sum = 0.0f;
    for (int token = start; token < end; token++) {
        const T* key = keys_of(pool, table, block_stride, layer, head, block_tokens, token);
        const T* value = key + static_cast<u64>(kv_heads) * block_tokens * HEAD_DIM;
        float score = 0.0f;
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) score += e * 32 + lane < HEAD_DIM ? q[e] * key[e * 32 + lane] : 0.0f;
        score = SCORE(warp_sum(score));
        const float best = fmaxf(highest, score), shrink = exp2f(highest - best), weight = exp2f(score - best);
        highest = best;
        sum = sum * shrink + weight;
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            outputs[e] = outputs[e] * shrink + (e * 32 + lane < HEAD_DIM ? weight * value[e * 32 + lane] : 0.0f);
        }
    }
}

extern "C" __global__ void __launch_bounds__(128)
decode_attention(const T* qkv, const T* pool, const int* tables, const int* decode, float* partial, float* summary,
                 u64 block_stride, u64 layer, u32 heads, u32 kv_heads, u32 block_tokens, u32 splits, float scale
                 WINDOW_PARAMETER CAP_PARAMETER) {
    let_later_begin();
    wait_for_earlier();
    const int* entry = decode + blockIdx.z * 3;
    const int length = entry[1], lane = threadIdx.x % 32;
    if (length == 0) return;
    const int group = heads / kv_heads, group_tiles = (group + 15) / 16;
    const int kv_head = blockIdx.y / group_tiles, first = blockIdx.y % group_tiles * 16;
    const int oldest = OLDEST(length - 1), per_split = split_tokens(length - oldest, splits);
    const int start = oldest + blockIdx.x * per_split, end = min(length, start + per_split);
    for (int g = first + threadIdx.x / 32; g < min(group, first + 16); g += blockDim.x / 32) {
        const int head = kv_head * group + g;
        float outputs[ELEMENTS], highest, sum;
        const T* query = qkv + (static_cast<u64>(entry[0]) * (heads + 2 * kv_heads) + head) * HEAD_DIM;
        attend(query, pool, tables + entry[2], block_stride, layer, kv_head, kv_heads, block_tokens, start, end, scale
               CAP_ARGUMENT, outputs, highest, sum);
        const u64 at = (static_cast<u64>(blockIdx.z) * heads + head) * splits + blockIdx.x;
        if (lane == 0) {
            summary[at * 2] = highest;
            summary[at * 2 + 1] = sum;
        }
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            if (e * 32 + lane < HEAD_DIM && start < end) partial[at * HEAD_DIM + e * 32 + lane] = outputs[e];
        }
    }
}

extern "C" __global__ void __launch_bounds__(128)
prefill_attention(const T* qkv, const T* pool, const int* tables, const int* tiles, T* out, u64 block_stride, u64 layer,
                  u32 heads, u32 kv_heads, u32 block_tokens, float scale WINDOW_PARAMETER CAP_PARAMETER) {
    let_later_begin();
    wait_for_earlier();
    const int* tile = tiles + blockIdx.x * 4;
    const int lane = threadIdx.x % 32, head = blockIdx.y, kv_head = head / (heads / kv_heads);
    for (int query = threadIdx.x / 32; query < tile[1]; query += blockDim.x / 32) {
        const u64 row = tile[0] + query;
        float outputs[ELEMENTS], highest, sum;
        attend(qkv + (row * (heads + 2 * kv_heads) + head) * HEAD_DIM, pool, tables + tile[3], block_stride, layer,
               kv_head, kv_heads, block_tokens, OLDEST(tile[2] + query), tile[2] + query + 1, scale CAP_ARGUMENT,
               outputs, highest, sum);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            if (e * 32 + lane < HEAD_DIM) out[(row * heads + head) * HEAD_DIM + e * 32 + lane] = outputs[e] / sum;
        }
    }
}
