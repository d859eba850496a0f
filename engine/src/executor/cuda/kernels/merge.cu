// Puts the splits of decode attention together. Grid (heads, sequences); maxima are in units of log 2.
extern "C" __global__ void __launch_bounds__(128)
merge_attention(const float* partial, const float* summary, const int* decode, T* out, u32 heads, u32 splits) {
    const int* entry = decode + blockIdx.y * 3;
    if (entry[1] == 0) return;
    const u64 first = (static_cast<u64>(blockIdx.y) * heads + blockIdx.x) * splits;
    float best = NEGATIVE_INFINITY;
    for (u32 s = 0; s < splits; s++) best = fmaxf(best, summary[(first + s) * 2]);
    float total = 0.0f;
    for (u32 s = 0; s < splits; s++) total += exp2f(summary[(first + s) * 2] - best) * summary[(first + s) * 2 + 1];
    T* to = out + (static_cast<u64>(entry[0]) * heads + blockIdx.x) * HEAD_DIM;
    for (u32 i = threadIdx.x; i < HEAD_DIM; i += blockDim.x) {
        float value = 0.0f;
        for (u32 s = 0; s < splits; s++) {
            const float weight = exp2f(summary[(first + s) * 2] - best);
            // A split without tokens has written no numerators.
            if (weight > 0.0f) value += weight * partial[(first + s) * HEAD_DIM + i];
        }
        to[i] = narrow(value / total);
    }
}
