// Products of rows with the matrices of their experts in f32, for checks of exactness: plain, with one thread per
// result. Arguments and results are those of the bf16 kernels.

__device__ __forceinline__ float product_of(const T* x, const T* weights, u32 inputs) {
    float sum = 0.0f;
    for (u32 i = 0; i < inputs; i++) sum += x[i] * weights[i];
    return sum;
}

// Calls `use(place, output)` for every pair of a tile and output of the block.
template <class Use>
__device__ __forceinline__ void each_of_tile(const int* tile, u32 at_once, u32 outputs, Use use) {
    for (u32 i = threadIdx.x; i < static_cast<u32>(tile[2]) * at_once; i += blockDim.x) {
        const u32 output = blockIdx.x * at_once + i % at_once;
        if (output < outputs) use(static_cast<u32>(tile[1]) + i / at_once, output);
    }
}

extern "C" __global__ void __launch_bounds__(128)
expert_gate_up(const T* x, const T* weights, const int* order, const int* tiles, T* out, u32 inputs, u32 outputs,
               u32 per_token ACTIVATION_PARAMETER) {
    let_later_begin();
    wait_for_earlier();
    const int* tile = tiles + blockIdx.y * 3;
    each_of_tile(tile, 32, outputs, [&](u32 place, u32 output) {
        const T* row = x + static_cast<u64>(static_cast<u32>(order[place]) / per_token) * inputs;
        const T* gate = weights + (static_cast<u64>(tile[0]) * 2 * outputs + output) * inputs;
        const float up = product_of(row, gate + static_cast<u64>(outputs) * inputs, inputs);
        out[static_cast<u64>(place) * outputs + output] = gated(product_of(row, gate, inputs), up ACTIVATION_ARGUMENT);
    });
}

extern "C" __global__ void __launch_bounds__(128)
expert_down(const T* x, const T* weights, const int* order, const int* tiles, float* out, u32 inputs, u32 outputs) {
    let_later_begin();
    wait_for_earlier();
    const int* tile = tiles + blockIdx.y * 3;
    each_of_tile(tile, 64, outputs, [&](u32 place, u32 output) {
        const T* from = weights + (static_cast<u64>(tile[0]) * outputs + output) * inputs;
        const float sum = product_of(x + static_cast<u64>(place) * inputs, from, inputs);
        out[static_cast<u64>(static_cast<u32>(order[place])) * outputs + output] = sum;
    });
}
