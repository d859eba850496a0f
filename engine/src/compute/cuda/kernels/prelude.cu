// Common code of all kernels, after ptx.cu.
//
// Defined by the host: ELEMENT_BF16 (0: f32), HEAD_DIM, DECODE_WARPS, DECODE_STAGES, KEYS, SPLIT_TOKENS.

#if ELEMENT_BF16
typedef u16 T;
__device__ __forceinline__ float widen(T x) { return __uint_as_float(static_cast<u32>(x) << 16); }
__device__ __forceinline__ T narrow(float x) { return narrow_1(x); }
#else
typedef float T;
__device__ __forceinline__ float widen(T x) { return x; }
__device__ __forceinline__ T narrow(float x) { return x; }
#endif

#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define ALL_LANES 0xffffffffu

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) x += __shfl_xor_sync(ALL_LANES, x, lanes);
    return x;
}

// Returns the sum over a block to every thread. `scratch` has a value per warp; the block consists of whole warps.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = lane < warps ? scratch[lane] : 0.0f;
    return warp_sum(x);
}

// Four values that are loaded and stored together.
struct alignas(16) Four {
    float at[4];
};
__device__ __forceinline__ void store_4(T* to, const float (&x)[4]) {
#if ELEMENT_BF16
    struct alignas(8) Two {
        u32 at[2];
    };
    *reinterpret_cast<Two*>(to) = Two{{narrow_2(x[0], x[1]), narrow_2(x[2], x[3])}};
#else
    *reinterpret_cast<Four*>(to) = Four{{x[0], x[1], x[2], x[3]}};
#endif
}

// Start of one token's keys of one head. Its values are `kv_heads * block_tokens * HEAD_DIM` elements later. `layer` is
// the layer's first element in block 0.
__device__ __forceinline__ const T* keys_of(const T* pool, const int* table, u64 block_stride, u64 layer, int head,
                                            int block_tokens, int token) {
    const u64 block = static_cast<u64>(table[token / block_tokens]);
    const u64 vector = static_cast<u64>(head) * block_tokens + token % block_tokens;
    return pool + block * block_stride + layer + vector * HEAD_DIM;
}

// Tokens of each split of decode attention. All splits but the last consist of whole tiles.
__device__ __forceinline__ int split_tokens(int length, int splits) {
    return ((length + splits - 1) / splits + SPLIT_TOKENS - 1) / SPLIT_TOKENS * SPLIT_TOKENS;
}
