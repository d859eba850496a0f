// Parts of the bf16 attention kernels: asynchronous copies into shared memory, and products of 16 x 8 x 16.
//
// Rows in shared memory are 16 bytes longer than a head, an odd number of 16-byte words. The eight rows that one
// ldmatrix reads are therefore in different banks.

#define CHUNKS (HEAD_DIM / 8)
#define ROW_BYTES (HEAD_DIM * 2 + 16)
#define STEPS (HEAD_DIM / 16)

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// One warp requests keys and values of the 16 tokens from `token`; zeros from `end` on.
__device__ __forceinline__ void request_16(u32 keys, u32 values, const T* pool, const int* table, u64 block_stride,
                                           u64 layer, int head, int kv_heads, int block_tokens, int token, int end) {
    const int lane = threadIdx.x % 32;
    // Lane l has the block of token l. A token past the end is not looked up, because its block may not exist.
    const int mine = token + lane % 16;
    const T* at = keys_of(pool, table, block_stride, layer, head, block_tokens, mine < end ? mine : end - 1);
    const u64 values_on = static_cast<u64>(kv_heads) * block_tokens * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; i++) {
        const int chunk = i * 32 + lane, row = chunk / CHUNKS, column = chunk % CHUNKS;
        const T* from = reinterpret_cast<const T*>(__shfl_sync(ALL_LANES, reinterpret_cast<u64>(at), row)) + column * 8;
        const u32 bytes = token + row < end ? 16 : 0, offset = row * ROW_BYTES + column * 16;
        copy_16(keys + offset, from, bytes);
        copy_16(values + offset, from + values_on, bytes);
    }
}

// Queries as the left operand: row r of the 16 is `rows` + r * stride, zeros from `count` on.
__device__ __forceinline__ void load_queries(u32 (&q)[STEPS][4], const T* rows, u64 stride, int count) {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int r = row + part % 2 * 8, c = k * 16 + column + part / 2 * 8;
            q[k][part] = r < count ? *reinterpret_cast<const u32*>(rows + r * stride + c) : 0;
        }
    }
}

// scores[0..2] = queries times 16 keys.
__device__ __forceinline__ void score_16(float (&scores)[2][4], const u32 (&q)[STEPS][4], u32 keys) {
    const int lane = threadIdx.x % 32;
    const u32 at = keys + (lane % 8 + lane / 16 * 8) * ROW_BYTES + lane / 8 % 2 * 16;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        u32 b[4];
        load_4(b, at + k * 32);
        multiply_add(scores[0], q[k], b[0], b[1]);
        multiply_add(scores[1], q[k], b[2], b[3]);
    }
}

// outputs += weights times 16 values.
__device__ __forceinline__ void gather_16(float (&outputs)[HEAD_DIM / 8][4], const float (&weights)[2][4], u32 values) {
    const int lane = threadIdx.x % 32;
    const u32 p[4] = {narrow_2(weights[0][0], weights[0][1]), narrow_2(weights[0][2], weights[0][3]),
                      narrow_2(weights[1][0], weights[1][1]), narrow_2(weights[1][2], weights[1][3])};
    const u32 at = values + lane % 16 * ROW_BYTES + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        u32 b[4];
        load_4_transposed(b, at + k * 32);
        multiply_add(outputs[2 * k], p, b[0], b[1]);
        multiply_add(outputs[2 * k + 1], p, b[2], b[3]);
    }
}
