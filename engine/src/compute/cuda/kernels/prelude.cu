// Common code of all kernels, after ptx.cu.
//
// Defined by the host: ELEMENT_BF16 (0: f32), HEAD_DIM, DECODE_WARPS, DECODE_STAGES, KEYS, SPLIT_TOKENS, and each
// feature of a model as 0 or 1, with experts EXPERT_ROWS, EXPERTS_MAX and CHOSEN_MAX too. Kernels for a model without
// a feature have neither its parameter nor its code.

#if ELEMENT_BF16
typedef u16 T;
__device__ __forceinline__ float widen(T x) { return __uint_as_float(static_cast<u32>(x) << 16); }
__device__ __forceinline__ T narrow(float x) { return narrow_1(x); }
#else
typedef float T;
__device__ __forceinline__ float widen(T x) { return x; }
__device__ __forceinline__ T narrow(float x) { return x; }
#endif

// Keys that a query sees, its own included. The first one that the query at a position sees.
#if WINDOWS
#define WINDOW_PARAMETER , u32 window
#define OLDEST(position) max(0, (position) + 1 - static_cast<int>(window))
#define IS_BEFORE_WINDOW(key, position) ((key) < OLDEST(position))
#define IS_HIDDEN(key, position) ((key) > (position) || (key) < OLDEST(position))
#else
#define WINDOW_PARAMETER
#define OLDEST(position) 0
#define IS_BEFORE_WINDOW(key, position) false
#define IS_HIDDEN(key, position) ((key) > (position))
#endif
// A score in units of log 2; with a soft cap `cap * tanh(score / cap)` of it.
#define LOG2_E 1.4426950408889634f
#if SCORE_CAPS
#define CAP_PARAMETER , float cap
#define CAP_ARGUMENT , cap
#define SCORE_FACTOR (scale / cap)
#define SCORE(product) (tanhf((product) * factor) * (cap * LOG2_E))
#else
#define CAP_PARAMETER
#define CAP_ARGUMENT
#define SCORE_FACTOR (scale * LOG2_E)
#define SCORE(product) ((product) * factor)
#endif
// Multiplier of embeddings.
#if SCALED_EMBEDDINGS
#define SCALE_PARAMETER , float scale
#define EMBEDDED(value) ((value) * scale)
#else
#define SCALE_PARAMETER
#define EMBEDDED(value) (value)
#endif
// Weights of the norm of values before they are added to the residual stream; may be null.
#if POST_NORMS
#define POST_PARAMETER , const float* post
#define ADDED(value, i) (post ? (value) * post_scale * post[i] : (value))
#else
#define POST_PARAMETER
#define ADDED(value, i) (value)
#endif
// Elements of a head that are rotated, from the first on. Pairs of the others follow those.
#if PARTIAL_ROTARY
#define ROTARY_PARAMETER , u32 rotary
#define LOW(i) ((i) < rotary / 2 ? (i) : (i) + rotary / 2)
#define HIGH(i) ((i) < rotary / 2 ? (i) + rotary / 2 : (i) + HALF)
#else
#define ROTARY_PARAMETER
#define LOW(i) (i)
#define HIGH(i) ((i) + HALF)
#endif
// The activation of gate: 0 silu, 1 gelu, approximated by a hyperbolic tangent.
#if GELU
#define ACTIVATION_PARAMETER , u32 activation
#define ACTIVATION_ARGUMENT , activation
#else
#define ACTIVATION_PARAMETER
#define ACTIVATION_ARGUMENT
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

// activation(gate) * up
__device__ __forceinline__ float gated(float gate, float up ACTIVATION_PARAMETER) {
#if GELU
    // The root of 2 / pi.
    const float inner = 0.7978846f * (gate + 0.044715f * (gate * gate * gate));
    if (activation == 1) return 0.5f * gate * (1.0f + tanhf(inner)) * up;
#endif
    return gate / (1.0f + expf(-gate)) * up;
}
