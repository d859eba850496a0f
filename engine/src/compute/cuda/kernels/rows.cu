// Kernels that work row by row: embedding, residual and norm, activation.

// hidden[row] = table[tokens[row]]; one block per row.
extern "C" __global__ void __launch_bounds__(256)
embed(const int* tokens, const T* table, float* hidden, u32 width SCALE_PARAMETER) {
    let_later_begin();
    wait_for_earlier();
    const T* from = table + static_cast<u64>(tokens[blockIdx.x]) * width;
    float* to = hidden + static_cast<u64>(blockIdx.x) * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) to[i] = EMBEDDED(widen(from[i]));
}

// hidden += delta + bias (normed with `post`); out = hidden / rms(hidden) * weight; one block per row of `out`.
// `delta`, `bias` and `rows` may be null. With `rows`, row i of `out` is computed from row rows[i] of the others, and skipped if
// that is negative.
extern "C" __global__ void __launch_bounds__(512)
add_rms_norm(float* hidden, const float* delta, const float* bias, const float* weight, const int* rows, T* out, u32 width,
             float eps POST_PARAMETER) {
    // Groups of four values of a row that a thread keeps in registers.
    constexpr u32 KEPT = 4;
    __shared__ float scratch[16];
    let_later_begin();
    const int row = rows ? rows[blockIdx.x] : static_cast<int>(blockIdx.x);
    const bool is_short = width % 4 == 0 && width <= 4 * KEPT * blockDim.x;
    Four by[KEPT];
    if (is_short) {
#pragma unroll
        for (u32 k = 0; k < KEPT; k++) {
            const u32 i = (k * blockDim.x + threadIdx.x) * 4;
            if (i < width) by[k] = *reinterpret_cast<const Four*>(weight + i);
        }
    }
    wait_for_earlier();
    if (row < 0) return;
    float* x = hidden + static_cast<u64>(row) * width;
    const float* add = delta ? delta + static_cast<u64>(row) * width : nullptr;
    T* to = out + static_cast<u64>(blockIdx.x) * width;
    float squares = 0.0f;
#if POST_NORMS
    float post_squares = 0.0f;
    if (add && post) {
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
            const float value = add[i] + (bias ? bias[i] : 0.0f);
            post_squares += value * value;
        }
    }
    const float post_scale = 1.0f / sqrtf(block_sum(post_squares, scratch) / static_cast<float>(width) + eps);
#endif
    if (is_short) {
        Four kept[KEPT];
#pragma unroll
        for (u32 k = 0; k < KEPT; k++) {
            const u32 i = (k * blockDim.x + threadIdx.x) * 4;
            if (i >= width) continue;
            kept[k] = *reinterpret_cast<const Four*>(x + i);
            if (add) {
                const Four more = *reinterpret_cast<const Four*>(add + i);
                const Four constant = bias ? *reinterpret_cast<const Four*>(bias + i) : Four{};
#pragma unroll
                for (int j = 0; j < 4; j++) kept[k].at[j] += ADDED(more.at[j] + constant.at[j], i + j);
                *reinterpret_cast<Four*>(x + i) = kept[k];
            }
#pragma unroll
            for (int j = 0; j < 4; j++) squares += kept[k].at[j] * kept[k].at[j];
        }
        const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / static_cast<float>(width) + eps);
#pragma unroll
        for (u32 k = 0; k < KEPT; k++) {
            const u32 i = (k * blockDim.x + threadIdx.x) * 4;
            if (i >= width) continue;
            float scaled[4];
#pragma unroll
            for (int j = 0; j < 4; j++) scaled[j] = kept[k].at[j] * scale * by[k].at[j];
            store_4(to + i, scaled);
        }
        return;
    }
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float value = x[i];
        if (add) {
            value += ADDED(add[i] + (bias ? bias[i] : 0.0f), i);
            x[i] = value;
        }
        squares += value * value;
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / static_cast<float>(width) + eps);
    // Each thread reads only values that it has written itself.
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) to[i] = narrow(x[i] * scale * weight[i]);
}

// out = activation(gate + bias) * (up + bias), where a row of `gate_up` is gate, then up; grid (parts of a row, rows).
extern "C" __global__ void __launch_bounds__(256)
silu_mul(const T* gate_up, const float* bias, T* out, u32 width ACTIVATION_PARAMETER) {
    let_later_begin();
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    const u64 row = blockIdx.y;
    float gate = widen(gate_up[row * 2 * width + i]), up = widen(gate_up[row * 2 * width + width + i]);
    if (bias) {
        gate += bias[i];
        up += bias[width + i];
    }
    out[row * width + i] = narrow(gated(gate, up ACTIVATION_ARGUMENT));
}

#if LOGIT_CAP
// logits = cap * tanh(logits / cap); grid (parts of a row, rows).
extern "C" __global__ void __launch_bounds__(256) cap_logits(float* logits, u32 width, float cap) {
    let_later_begin();
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    float* at = logits + static_cast<u64>(blockIdx.y) * width + i;
    *at = cap * tanhf(*at / cap);
}
#endif
