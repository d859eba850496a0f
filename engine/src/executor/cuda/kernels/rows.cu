// What is done row by row: embedding, residual and norm, activation.

// hidden[row] = table[tokens[row]]; one block per row.
extern "C" __global__ void __launch_bounds__(256) embed(const int* tokens, const T* table, float* hidden, u32 width) {
    const T* from = table + static_cast<u64>(tokens[blockIdx.x]) * width;
    float* to = hidden + static_cast<u64>(blockIdx.x) * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) to[i] = widen(from[i]);
}

// hidden += delta + bias; out = hidden / rms(hidden) * weight; one block per row of `out`.
// `delta`, `bias` and `rows` may be null. With `rows`, row i of `out` is made of row rows[i] of the others, and of
// nothing where that is negative.
extern "C" __global__ void __launch_bounds__(512)
add_rms_norm(float* hidden, const T* delta, const float* bias, const float* weight, const int* rows, T* out, u32 width,
             float eps) {
    __shared__ float scratch[16];
    const int row = rows ? rows[blockIdx.x] : static_cast<int>(blockIdx.x);
    if (row < 0) return;
    float* x = hidden + static_cast<u64>(row) * width;
    const T* add = delta ? delta + static_cast<u64>(row) * width : nullptr;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float value = x[i];
        if (add) {
            value += widen(add[i]) + (bias ? bias[i] : 0.0f);
            x[i] = value;
        }
        squares += value * value;
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / static_cast<float>(width) + eps);
    T* to = out + static_cast<u64>(blockIdx.x) * width;
    // Each thread reads what it has written itself.
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) to[i] = narrow(x[i] * scale * weight[i]);
}

// out = silu(gate + bias) * (up + bias), where a row of `gate_up` is gate, then up; grid (parts of a row, rows).
extern "C" __global__ void __launch_bounds__(256)
silu_mul(const T* gate_up, const float* bias, T* out, u32 width) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    const u64 row = blockIdx.y;
    float gate = widen(gate_up[row * 2 * width + i]), up = widen(gate_up[row * 2 * width + width + i]);
    if (bias) {
        gate += bias[i];
        up += bias[width + i];
    }
    out[row * width + i] = narrow(gate / (1.0f + expf(-gate)) * up);
}
