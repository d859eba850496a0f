// Combines the splits of decode attention. Grid (heads, sequences); maxima are in units of log 2.
//
// Lane l of every warp has the weights of splits l and l + 32. The warps divide the splits, and the block combines
// their sums.
extern "C" __global__ void __launch_bounds__(256)
merge_attention(const float* partial, const float* summary, const int* decode, T* out, u32 heads, u32 splits) {
    constexpr int WARPS = 8, MINE = (HEAD_DIM + 31) / 32;
    __shared__ float meeting[WARPS][HEAD_DIM];
    let_later_begin();
    const int* entry = decode + blockIdx.y * 3;
    const int row = entry[0], keys = entry[1];
    wait_for_earlier();
    if (keys == 0) return;
    const u64 first = (static_cast<u64>(blockIdx.y) * heads + blockIdx.x) * splits;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float highest[2], weight[2];
    float total = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 s = half * 32 + lane;
        highest[half] = s < splits ? summary[(first + s) * 2] : NEGATIVE_INFINITY;
    }
    float best = fmaxf(highest[0], highest[1]);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, lanes));
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 s = half * 32 + lane;
        weight[half] = exp2f(highest[half] - best);
        if (s < splits) total += weight[half] * summary[(first + s) * 2 + 1];
    }
    total = warp_sum(total);

    float values[MINE] = {};
#pragma unroll 8
    for (u32 s = warp; s < splits; s += WARPS) {
        const float by = __shfl_sync(ALL_LANES, s < 32 ? weight[0] : weight[1], static_cast<int>(s % 32));
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            const u32 i = m * 32 + lane;
            // A split without tokens has written no numerators.
            if (i < HEAD_DIM && by > 0.0f) values[m] += by * partial[(first + s) * HEAD_DIM + i];
        }
    }
#pragma unroll
    for (int m = 0; m < MINE; m++) {
        const u32 i = m * 32 + lane;
        if (i < HEAD_DIM) meeting[warp][i] = values[m];
    }
    __syncthreads();
    T* to = out + (static_cast<u64>(row) * heads + blockIdx.x) * HEAD_DIM;
    for (u32 i = threadIdx.x; i < HEAD_DIM; i += blockDim.x) {
        float value = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) value += meeting[w][i];
        to[i] = narrow(value / total);
    }
}
