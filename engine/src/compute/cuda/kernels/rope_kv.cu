// Bias, head norm and rotation of q and k, and the write of k and v to the pool, in one pass over the projection's
// output.
//
// A warp has one head of one row: unit u of a row is query head u, then key heads, then value heads. Grid (rows, units
// in groups of four). Queries are written back in place. Keys and values go to slot[row] = block * block_tokens +
// token; a negative slot is skipped.

#define HALF (HEAD_DIM / 2)
#define PAIRS ((HALF + 31) / 32)

extern "C" __global__ void __launch_bounds__(128)
rope_kv(T* qkv, const float* bias, const float* q_norm, const float* k_norm, const float* angles, const int* positions,
        const int* slots, T* pool, u64 block_stride, u64 layer, u32 heads, u32 kv_heads, u32 block_tokens, float eps
        ROTARY_PARAMETER) {
    let_later_begin();
    const u32 unit = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (unit >= heads + 2 * kv_heads) {
        wait_for_earlier();
        return;
    }
    const u64 row = blockIdx.x;
    T* head = qkv + (row * (heads + 2 * kv_heads) + unit) * HEAD_DIM;
    const bool is_query = unit < heads, is_value = unit >= heads + kv_heads;
    const int slot = slots[row];
    const float* angle = angles + static_cast<u64>(positions[row]) * HEAD_DIM;
    float cosine[PAIRS], sine[PAIRS];
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        const u32 i = p * 32 + lane;
        cosine[p] = is_value || i >= HALF ? 1.0f : angle[i];
        sine[p] = is_value || i >= HALF ? 0.0f : angle[HALF + i];
    }
    wait_for_earlier();
    if (!is_query && slot < 0) return;

    float low[PAIRS], high[PAIRS];
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        const u32 i = p * 32 + lane;
        low[p] = high[p] = 0.0f;
        if (i < HALF) {
            low[p] = widen(head[LOW(i)]);
            high[p] = widen(head[HIGH(i)]);
            if (bias) {
                low[p] += bias[unit * HEAD_DIM + LOW(i)];
                high[p] += bias[unit * HEAD_DIM + HIGH(i)];
            }
        }
    }
    const float* norm = is_value ? nullptr : is_query ? q_norm : k_norm;
    if (norm) {
        float squares = 0.0f;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) squares += low[p] * low[p] + high[p] * high[p];
        const float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(HEAD_DIM) + eps);
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const u32 i = p * 32 + lane;
            if (i < HALF) {
                low[p] *= scale * norm[LOW(i)];
                high[p] *= scale * norm[HIGH(i)];
            }
        }
    }
    T* to = head;
    if (!is_query) {
        const u32 index = unit - heads;  // keys, then values
        const u64 vector = static_cast<u64>(index) * block_tokens + static_cast<u32>(slot) % block_tokens;
        to = pool + static_cast<u64>(static_cast<u32>(slot) / block_tokens) * block_stride + layer + vector * HEAD_DIM;
    }
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        const u32 i = p * 32 + lane;
        if (i >= HALF) continue;
        to[LOW(i)] = narrow(low[p] * cosine[p] - high[p] * sine[p]);
        to[HIGH(i)] = narrow(high[p] * cosine[p] + low[p] * sine[p]);
    }
}
